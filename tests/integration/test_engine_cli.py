"""`headwater` as a command: one engine to a data directory, files that are applied twice, errors and exit codes."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from engine_process import EngineProcess, headwater, running, wait_until

pytestmark = pytest.mark.spark
PIPELINE = """
CREATE TABLE notes (id BIGINT PRIMARY KEY, body STRING);
INSERT INTO notes VALUES (1, 'from the file: Größe ☃');
"""
NAME = "dätä ünï☃"
# What a service may be started with, and what must change nothing: no locale, and a umask that hides nothing.
CARELESS = ("sh", "-c", 'umask 000 && exec "$@"', "sh", "env", "LC_ALL=C")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("cli")
    (found / "pipeline.sql").write_text(PIPELINE, encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def engine(place: Path) -> Iterator[EngineProcess]:
    found = EngineProcess(place / NAME, file=place / "pipeline.sql")
    try:
        found.start((*CARELESS, f"SPARK_LOCAL_DIRS={place / 'spark'}"))
        _wait_for_table(found)
        yield found
    finally:
        found.stop()


def _wait_for_table(engine: EngineProcess) -> None:
    deadline = time.monotonic() + 60
    while not engine.sql("SELECT * FROM hw_catalog.hw_jobs") and time.monotonic() < deadline:
        time.sleep(0.1)


def test_a_second_engine_on_the_same_directory_is_refused_with_exit_code_2(engine: EngineProcess) -> None:
    done = headwater("run", data_dir=engine.data_dir)
    assert done.returncode == 2
    assert done.stderr.startswith("error: [ENGINE_RUNNING]")
    assert f"process {engine.process.pid}" in done.stderr if engine.process else False
    assert engine.sql("SELECT 1 AS a") == [{"a": 1}]


def test_commands_go_to_the_running_engine(engine: EngineProcess) -> None:
    done = headwater("sql", "-c", "SELECT body FROM notes WHERE id = 1", "--format", "csv", data_dir=engine.data_dir)
    assert (done.returncode, done.stdout) == (0, "body\nfrom the file: Größe ☃\n")
    status = headwater("status", "--json", data_dir=engine.data_dir)
    found = json.loads(status.stdout)
    assert "notes" in [j["name"] for j in found["jobs"]]
    assert found["engine"]["pid"] == (engine.process.pid if engine.process else 0)


def test_a_directory_with_a_name_beyond_ascii_works_without_a_locale(engine: EngineProcess) -> None:
    """By both writers of segments, and by what Spark's JVM reads itself."""
    engine.sql("CREATE TABLE größe (id INT PRIMARY KEY, m MAP<STRING, INT>, v STRING)")
    engine.sql("INSERT INTO größe VALUES (1, map('ä', 1), 'ü☃')")
    engine.sql("CREATE TABLE plain (id BIGINT PRIMARY KEY, v STRING)")
    engine.sql("INSERT INTO plain SELECT id, concat('ü☃', id) FROM range(1000)")
    engine.sql("CREATE MATERIALIZED VIEW counted AS SELECT count(*) AS n FROM plain; FLUSH")
    assert engine.sql("SELECT v FROM größe") == [{"v": "ü☃"}]
    assert engine.sql("SELECT v FROM plain WHERE id = 7") == [{"v": "ü☃7"}]
    assert engine.sql("SELECT n FROM counted") == [{"n": 1000}]


def test_everything_in_the_data_directory_is_its_owners_alone_and_a_target_is_for_others(
    engine: EngineProcess, place: Path
) -> None:
    for name, connector in (("out", "files"), ("../../escaped/x", "files"), ("lake", "delta")):
        target = place / f"target-{connector}-{len(name)}"
        engine.sql(f"CREATE SINK `{name}` FROM plain WITH (connector='{connector}', path='{target}')")
    wait_until(
        lambda: all(r["delivered_to"] for r in engine.sql("SELECT * FROM hw_catalog.hw_log_stores")), what="delivery"
    )
    found = {p.relative_to(engine.data_dir): p.stat().st_mode for p in engine.data_dir.rglob("*")}
    assert len([p for p in found if p.suffix == ".parquet"]) >= 3
    assert {str(p): oct(mode) for p, mode in found.items() if mode & 0o077} == {}
    assert not engine.data_dir.stat().st_mode & 0o077
    spark = [*(place / "spark").rglob("*")]
    assert any(p.name.startswith("blockmgr-") for p in spark)
    assert {str(p): oct(p.stat().st_mode) for p in spark if p.stat().st_mode & 0o077} == {}
    # As before: the files sink by the user's umask, which is 0 here, and Hadoop's own 022.
    files = [
        p for t in place.glob("target-*") for p in t.rglob("*") if p.is_file() and p.suffix in (".parquet", ".json")
    ]
    assert len({p.parts[len(place.parts)] for p in files}) == 3
    assert {str(p): oct(p.stat().st_mode) for p in files if not p.stat().st_mode & 0o004} == {}
    assert not (place / "escaped").exists() and not (place.parent / "escaped").exists()
    for name in ("out", "../../escaped/x", "lake"):
        engine.sql(f"DROP SINK `{name}`")


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
        assert again.process is not None
        deadline = time.monotonic() + 60
        while len(again.sql("SHOW TABLES")) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        # The file's INSERT ran once; what was acknowledged before SIGTERM is there.
        found = [r["id"] for r in again.sql("SELECT id FROM notes ORDER BY id")]
        assert found == [1, 2]
        old = again.sql("SELECT min(epoch) AS e FROM hw_catalog.hw_epochs")[0]["e"]
        assert old < again.epoch()
        wait_until(lambda: again.sql("SELECT count(*) AS n FROM more") == [{"n": 2}], what="the end of the file")
        again.sql("INSERT INTO notes VALUES (3, 'acknowledged before the terminal was closed')")
        # As a closed terminal does it: to the engine and all that it has started in its process group.
        os.killpg(again.process.pid, signal.SIGHUP)
        assert again.process.wait(60) == 0
        assert not (engine.data_dir / "endpoint.json").exists()
    other = place / "other.sql"
    other.write_text(
        "SELECT id FROM notes ORDER BY id; CREATE TABLE notes (id BIGINT PRIMARY KEY, body STRING, more INT);"
    )
    done = headwater("run", str(other), "--master", "local[2]", data_dir=engine.data_dir)
    assert done.returncode == 2
    assert done.stdout.split()[2:] == ["1", "2", "3", "(3", "rows)"]
    assert "error: [DEFINITION_DIFFERS] table notes" in done.stderr
