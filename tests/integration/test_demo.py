"""The first five minutes as a new user has them: `init`, `check`, the demo; test_docs_examples.py has the tutorial."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from engine_process import COMMAND
from headwater.cli.commands import app
from headwater.testing.servers import PostgresServer


def connection_flags(server: PostgresServer, role: str, database: str) -> list[str]:
    flags = ["--hostname", server.host, "--port", str(server.port), "--username", role, "--database", database]
    return [*flags, "--slot", f"slot_{database}"]


# -- init and check -------------------------------------------------------------------------------------------------


@pytest.fixture
def limited(postgres18: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresServer]:
    """A database with three tables and a role that has no rights there yet."""
    postgres18.execute("DROP DATABASE IF EXISTS setup_test", "DROP ROLE IF EXISTS newcomer")
    postgres18.create_database("setup_test")
    postgres18.execute(
        "CREATE ROLE newcomer LOGIN PASSWORD 'a-test-password'",
        "CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric(10,2))",
        "CREATE TABLE log (line text)",
        "CREATE SCHEMA crm",
        'CREATE TABLE crm."Contact" (id int PRIMARY KEY)',
        database="setup_test",
    )
    monkeypatch.setenv("PGPASSWORD", "a-test-password")
    yield postgres18
    postgres18.execute("DROP DATABASE setup_test WITH (FORCE)", "DROP ROLE newcomer")


def test_check_names_the_sql_for_what_is_missing_and_is_content_once_it_was_run(limited: PostgresServer) -> None:
    arguments = ["check", *connection_flags(limited, "newcomer", "setup_test"), "--table", "public.orders"]
    before = CliRunner().invoke(app, arguments)
    assert before.exit_code == 1
    fixes = re.findall(r"run: (.*)", before.stdout)
    assert any(f.startswith("ALTER ROLE") for f in fixes)
    assert any("GRANT SELECT" in f for f in fixes)
    limited.execute(*fixes, database="setup_test")
    after = CliRunner().invoke(app, arguments)
    assert after.exit_code == 0, after.stdout
    assert "WRONG" not in after.stdout


def test_init_writes_a_file_that_check_can_read(limited: PostgresServer, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.sql"
    made = CliRunner().invoke(app, ["init", str(file), *connection_flags(limited, "newcomer", "setup_test")])
    assert made.exit_code == 0, made.output
    text = file.read_text()
    assert "CREATE TABLE orders (*) FROM setup_test TABLE 'public.orders';" in text
    assert "CREATE TABLE `crm_Contact` (*) FROM setup_test TABLE 'crm.Contact';" in text
    assert "-- public.log cannot be captured" in text
    assert "a-test-password" not in text
    checked = CliRunner().invoke(app, ["check", str(file)])
    assert checked.exit_code == 1
    assert "crm.Contact" in checked.stdout


def in_terminal(command: list[str], answers: list[tuple[str, str]], folder: Path) -> tuple[str, int]:
    """Runs a command with a terminal, and types each answer when its question stands there; what was seen, and the
    exit code.
    """
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execv(command[0], command)
    seen, waiting = "", list(answers)
    with contextlib.suppress(OSError), open(terminal, "r+b", buffering=0) as typing:  # the terminal ends as an error
        while part := typing.read(1000):
            seen += part.decode()
            if waiting and waiting[0][0] in seen:
                typing.write(waiting.pop(0)[1].encode() + b"\n")
    return seen, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_init_asks_in_a_terminal_for_what_was_not_given(limited: PostgresServer, tmp_path: Path) -> None:
    answers = [("Host", limited.host), ("Port", str(limited.port)), ("Database", "setup_test"), ("Role", "newcomer")]
    seen, code = in_terminal([*COMMAND, "init"], [*answers, ("Tables", "orders")], tmp_path)
    assert code == 0, seen
    text = (tmp_path / "pipeline.sql").read_text()
    assert f"port = '{limited.port}'" in text
    assert "TABLE 'public.orders'" in text and "crm" not in text


def test_init_refuses_a_table_that_is_not_there(limited: PostgresServer, tmp_path: Path) -> None:
    arguments = ["init", str(tmp_path / "x.sql"), *connection_flags(limited, "newcomer", "setup_test")]
    result = CliRunner().invoke(app, [*arguments, "--table", "ordres"])
    assert "the source has no table ordres" in str(result.exception)
    assert not (tmp_path / "x.sql").exists()


# -- the demo -------------------------------------------------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for temporary files that the server can enter too: it may run as another user."""
    with tempfile.TemporaryDirectory(prefix="demo-test-") as name:
        os.chmod(name, 0o711)
        yield Path(name)


@pytest.mark.slow
def test_demo_ends_with_everything_equal_and_nothing_left(place: Path) -> None:
    command = [sys.executable, "-m", "headwater.cli", "demo", "--rows", "20000", "--seconds", "3"]
    environment = {**os.environ, "TMPDIR": str(place), "HEADWATER_DRIVER_MEMORY": "1g"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    for part in ("kill -9", "table orders", "view revenue", "sink revenue_out", "everything is equal"):
        assert part in run.stdout
    assert "\x1b" not in run.stdout, "without a terminal there are only plain lines"
    assert list(place.glob("headwater-*")) == []
    assert _processes_with(str(place)) == []


def _processes_with(text: str) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if text in line:
            found.append(line)
    return found
