"""`headwater` as a command: one engine to a data directory, files that are applied twice, errors and exit codes."""

from __future__ import annotations

import json
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from engine_process import EngineProcess, headwater, running, wait_until
from spark_port import is_served, listening

pytestmark = pytest.mark.spark
PIPELINE = """
CREATE TABLE notes (id BIGINT PRIMARY KEY, body STRING);
INSERT INTO notes VALUES (1, 'from the file');
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("cli")
    (found / "pipeline.sql").write_text(PIPELINE)
    return found


@pytest.fixture(scope="module")
def engine(place: Path) -> Iterator[EngineProcess]:
    with running(place / "data", file=place / "pipeline.sql") as found:
        _wait_for_table(found)
        yield found


def _wait_for_table(engine: EngineProcess) -> None:
    deadline = time.monotonic() + 60
    while not engine.sql("SELECT * FROM hw_catalog.hw_jobs") and time.monotonic() < deadline:
        time.sleep(0.1)


def test_somebody_without_the_secret_is_served_at_no_port_of_spark(engine: EngineProcess) -> None:
    ports = {port for pid in engine.java for port in listening(pid)}
    assert len(ports) >= 3  # the driver, its blocks, and the way from Python
    assert not any(map(is_served, ports))


def test_a_second_engine_on_the_same_directory_is_refused_with_exit_code_2(engine: EngineProcess) -> None:
    done = headwater("run", data_dir=engine.data_dir)
    assert done.returncode == 2
    assert done.stderr.startswith("error: [ENGINE_RUNNING]")
    assert f"process {engine.process.pid}" in done.stderr if engine.process else False
    assert engine.sql("SELECT 1 AS a") == [{"a": 1}]


def test_commands_go_to_the_running_engine(engine: EngineProcess) -> None:
    done = headwater("sql", "-c", "SELECT body FROM notes WHERE id = 1", "--format", "csv", data_dir=engine.data_dir)
    assert (done.returncode, done.stdout) == (0, "body\nfrom the file\n")
    status = headwater("status", "--json", data_dir=engine.data_dir)
    found = json.loads(status.stdout)
    assert [j["name"] for j in found["jobs"]] == ["notes"]
    assert found["engine"]["pid"] == (engine.process.pid if engine.process else 0)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["sql", "-c", "SELEC 1"], 2, "error: [SQL_SYNTAX]"),
        (["sql", "-c", "SELECT * FROM nosuch"], 2, "error: [UNKNOWN_TABLE]"),
        (["sql", "-c", "SELECT 1/0"], 1, "error: [QUERY_FAILED]"),
        (["sql", "-c", "SELECT 1", "--format", "xml"], 2, "error: [OPTION_VALUE]"),
        (["drop", "nosuch"], 2, "error: [UNKNOWN_JOB]"),
        (["run", "/nonexistent.sql"], 2, "error: [FILE_UNREADABLE]"),
        (["run", "--set", "nosuch=1"], 2, "error: [UNKNOWN_PARAMETER]"),
        (["run", "--set", "barrier_interval_ms"], 2, "error: [OPTION_VALUE]"),
        (["run", "--http", "nosuch"], 2, "error: [OPTION_VALUE]"),
        (["resync", "no such"], 2, "error: [UNKNOWN_TABLE]"),
        (["dead-letters", "nosuch"], 2, "error: [UNKNOWN_SINK]"),
        (["nosuch"], 2, "error: [USAGE]"),
    ],
)
def test_errors_go_to_stderr_with_code_hint_and_exit_code(
    engine: EngineProcess, arguments: list[str], code: int, says: str
) -> None:
    done = headwater(*arguments, data_dir=engine.data_dir if arguments != ["nosuch"] else None)
    assert done.returncode == code
    assert says in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_foreign_token_host_or_origin_is_refused(engine: EngineProcess) -> None:
    endpoint = json.loads((engine.data_dir / "endpoint.json").read_text())
    assert stat.S_IMODE((engine.data_dir / "endpoint.json").stat().st_mode) == 0o600
    body = {"statement": "DROP TABLE notes"}
    url, token = f"{endpoint['url']}/sql", endpoint["token"]
    with httpx.Client(trust_env=False) as http:
        assert http.post(url, json=body).status_code == 401
        assert http.post(url, json=body, headers={"Authorization": "Bearer wrong"}).status_code == 401
        good = {"Authorization": f"Bearer {token}"}
        assert http.post(url, json=body, headers={**good, "Origin": "https://evil.example"}).status_code == 403
        assert http.post(url, json=body, headers={**good, "Host": "evil.example"}).status_code == 403
        assert http.get(f"{endpoint['url']}/healthz").status_code == 200
    assert engine.sql("SELECT count(*) AS n FROM notes") == [{"n": 1}]


def test_sigterm_stops_within_10_s_at_a_checkpoint_and_leaves_no_process(place: Path, engine: EngineProcess) -> None:
    """Uses up the module's engine: it must be the last test that needs it running."""
    assert engine.process is not None
    engine.sql("INSERT INTO notes VALUES (2, 'acknowledged, not flushed')")
    family = engine.children()
    begin = time.monotonic()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(60) == 0
    # The JVM notices a moment later that its parent is gone; all of it has 10 s.
    alive = lambda: [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]  # noqa: E731
    wait_until(lambda: not alive(), timeout=10 - (time.monotonic() - begin), what="the end of all processes")
    assert not (engine.data_dir / "endpoint.json").exists()
    status = headwater("status", "--json", data_dir=engine.data_dir)
    assert json.loads(status.stdout)["engine"]["running"] is False


def test_a_file_applied_again_creates_only_what_is_new_and_a_changed_definition_is_an_error(
    place: Path, engine: EngineProcess
) -> None:
    assert engine.process is not None and engine.process.poll() is not None
    longer = place / "longer.sql"
    longer.write_text(PIPELINE + "CREATE TABLE more (id INT);\nINSERT INTO more SELECT id FROM notes;")
    with running(engine.data_dir, file=longer) as again:
        deadline = time.monotonic() + 60
        while len(again.sql("SHOW TABLES")) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        # The file's INSERT ran once; what was acknowledged before SIGTERM is there.
        found = [r["id"] for r in again.sql("SELECT id FROM notes ORDER BY id")]
        assert found == [1, 2]
        old = again.sql("SELECT min(epoch) AS e FROM hw_catalog.hw_epochs")[0]["e"]
        assert old < again.epoch()
    other = place / "other.sql"
    other.write_text("CREATE TABLE notes (id BIGINT PRIMARY KEY, body STRING, more INT);")
    done = headwater("run", str(other), "--master", "local[2]", data_dir=engine.data_dir)
    assert done.returncode == 2
    assert "error: [DEFINITION_DIFFERS] table notes" in done.stderr
