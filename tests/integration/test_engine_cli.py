"""`headwater` as a command: one engine to a data directory, files that are applied twice, errors and exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from engine_process import COMMAND, EngineProcess, SqlError, headwater, running, wait_until
from spark_port import is_served, listening

pytestmark = pytest.mark.spark
PIPELINE = """
CREATE TABLE notes (id BIGINT PRIMARY KEY, body STRING);
INSERT INTO notes VALUES (1, 'from the file: Größe ☃');
"""
NAME = "dätä ünï☃ [x]{a}"
# What a service may be started with, and what must change nothing: no locale, and a umask that hides nothing.
CARELESS = ("sh", "-c", 'umask 000 && exec "$@"', "sh", "env", "LC_ALL=C")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("cli")
    (found / "pipeline.sql").write_text(PIPELINE, encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def engine(place: Path) -> Iterator[EngineProcess]:
    """With no more descriptors than many systems allow: nothing that a client does may use them up."""
    found = EngineProcess(place / NAME, file=place / "pipeline.sql")
    try:
        found.start((*CARELESS, f"SPARK_LOCAL_DIRS={place / 'spark'}", "prlimit", "--nofile=512:1024"))
        _wait_for_table(found)
        yield found
    finally:
        found.stop()


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


def test_the_read_token_asks_and_looks_and_both_tokens_are_printed(engine: EngineProcess) -> None:
    endpoint = json.loads((engine.data_dir / "endpoint.json").read_text())
    assert set(endpoint) == {"url", "token", "pid", "generation", "read_token"}
    for option, name in (([], "token"), (["--read"], "read_token")):
        done = headwater("token", *option, data_dir=engine.data_dir)
        assert (done.returncode, done.stdout) == (0, endpoint[name] + "\n")
    reader = {"Authorization": f"Bearer {endpoint['read_token']}"}
    with httpx.Client(base_url=endpoint["url"], headers=reader, trust_env=False, timeout=60) as http:
        assert "headwater_committed_epoch" in http.get("/metrics").text
        assert "notes" in [j["name"] for j in http.get("/status").json()["jobs"]]
        answer = http.post("/sql", json={"statement": "SELECT body FROM notes WHERE id = 1"})
        assert answer.json()["rows"][0]["body"].startswith("from the file")


def test_a_thousand_half_open_connections_of_others_take_nothing_from_the_owner(engine: EngineProcess) -> None:
    assert engine.process is not None
    address = ("127.0.0.1", engine.http.base_url.port or 0)
    half = b"POST /sql HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    others = []
    for number in range(1100):
        others.append(socket.create_connection(address, timeout=10))
        with contextlib.suppress(OSError):
            others[-1].sendall(half)
        if number % 100 == 0:
            with httpx.Client(base_url=engine.http.base_url, headers=engine.http.headers, trust_env=False) as owner:
                assert owner.get("/healthz", timeout=5).json() == {"healthy": True}
                assert owner.post("/sql", json={"statement": "SELECT 1 AS a"}, timeout=60).json()["rows"] == [{"a": 1}]
    assert psutil.Process(engine.process.pid).num_fds() < 800
    assert psutil.Process(engine.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (1024, 1024)
    engine.sql("INSERT INTO notes VALUES (7, 'besieged'); FLUSH; DELETE FROM notes WHERE id = 7; FLUSH")
    assert engine.sql("SELECT count(*) AS n FROM notes") == [{"n": 1}]
    for one in others:
        one.close()


FOR_EVER = "SELECT count(*) AS n FROM range(1000000000000) WHERE hash(id) = id"


def test_a_query_ends_when_its_client_leaves_or_its_time_is_over(engine: EngineProcess) -> None:
    def left(before: int) -> bool:
        return engine.spark_jobs("query") > before

    engine.sql("SELECT count(*) AS n FROM range(1000) WHERE hash(id) = id")  # from now on a query begins at once
    before = engine.spark_jobs("query")
    with pytest.raises(httpx.ReadTimeout):
        engine.http.post("/sql", json={"statement": FOR_EVER}, timeout=5)
    wait_until(lambda: left(before), timeout=20, what="the end of a query whose client has left")

    before = engine.spark_jobs("query")
    command = [*COMMAND, "sql", "-c", FOR_EVER, "--data-dir", str(engine.data_dir)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(6)
    assert client.poll() is None and not left(before)
    client.send_signal(signal.SIGINT)
    assert client.wait(10) != 0
    wait_until(lambda: left(before), timeout=20, what="the end of a query after ctrl-C")

    engine.sql("ALTER SYSTEM SET statement_timeout_s = 2")
    with pytest.raises(SqlError, match=r"\[STATEMENT_TIMEOUT\] the query took longer than 2 s"):
        engine.sql(FOR_EVER)
    engine.sql("ALTER SYSTEM SET statement_timeout_s = DEFAULT")
    begin = time.monotonic()
    engine.sql("SELECT 1 AS a")
    assert time.monotonic() - begin < 10


def test_a_large_answer_streams_while_health_and_epochs_go_on(engine: EngineProcess) -> None:
    assert engine.process is not None
    process = psutil.Process(engine.process.pid)
    rows, size, slowest, before = 0, 0, 0.0, process.memory_info().rss
    highest, last = before, engine.epoch()
    statement = "SELECT id, repeat('x', 1000) AS t FROM range(150000) ORDER BY id"
    with engine.http.stream("POST", "/sql", json={"statement": statement}) as answer, httpx.Client() as probe:
        for number, part in enumerate(answer.iter_raw(1 << 20)):
            size += len(part)
            rows += part.count(b'"id"')
            highest = max(highest, process.memory_info().rss)
            if number % 30 == 0:
                begin = time.monotonic()
                assert probe.get(f"{engine.http.base_url}/healthz", timeout=10).status_code == 200
                slowest = max(slowest, time.monotonic() - begin)
    assert rows == 150_000 and size > 150_000_000
    assert slowest < 1
    assert highest - before < 150 << 20  # less than there are bytes in the answer
    assert engine.epoch() > last


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
