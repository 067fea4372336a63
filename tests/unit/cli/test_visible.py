"""Text from outside neither steers a terminal nor forges a line of a log, and markup in it is only text."""

from __future__ import annotations

import io
import logging
import os
import pty
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from rich.console import Console

from headwater.cli.live import Reporter, error_line, plain_line, status_table
from headwater.cli.output import print_result
from headwater.cli.visible import PlainFormatter, visible

HOSTILE = "[/b] [link=http://evil]x[/link] \x1b]0;title\x07\x1b[2J \x9b31m \u202egnp.exe \r\nforged \x7f \udcff"
STEERING = ["\x1b", "\x07", "\x9b", "\u202e", "\r", "\x7f", "\udcff"]


def job(**more: Any) -> dict[str, Any]:
    found = {"name": HOSTILE, "kind": "table", "state": "creating", "phase": "copy", "percent": 12.5, "rows": 3}
    found |= {"rows_per_s": 1.0, "eta_s": 2.0, "waiting_for": HOSTILE, "done": 1, "total": 2}
    return found | more


def status(**more: Any) -> dict[str, Any]:
    return {"committed_epoch": 1, "engine": {"paused": False}, "jobs": [job(**more)], "errors": []}


def is_tame(text: str) -> bool:
    return not any(c in text for c in STEERING)


def test_what_steers_a_terminal_is_spelt_out_and_the_rest_stays() -> None:
    assert visible("a\x1b[31m\x9b\u202e\u2066\ud800\U000e0041\n\t") == (
        "a\\x1b[31m\\x9b\\u202e\\u2066\\ud800\\U000e0041\\n\\t"
    )
    assert visible("Grüße, 世界 [b] ☃ \\ é", keep="\n") == "Grüße, 世界 [b] ☃ \\ é"
    assert visible("a\nb\r", keep="\n") == "a\nb\\r"


def test_status_shows_markup_as_text_and_no_control_characters() -> None:
    out = io.StringIO()
    Console(file=out, width=1000).print(status_table(status()))
    assert "[/b] [link=http://evil]x[/link] \\x1b]0;title" in out.getvalue() and is_tame(out.getvalue())
    terminal = io.StringIO()
    Console(file=terminal, width=1000, force_terminal=True).print(status_table(status()))
    assert "\x1b]8;" not in terminal.getvalue() and "\x1b[2J" not in terminal.getvalue()


def test_lines_of_progress_and_errors_are_single_and_tame(capsys: pytest.CaptureFixture[str]) -> None:
    error = {"at": "2026-11-18T12:00:00+00:00", "name": HOSTILE, "code": "X", "message": HOSTILE, "hint": HOSTILE}
    for line in (plain_line(job()), error_line(error)):
        assert is_tame(line) and "\n" not in line
    with Reporter() as reporter:
        reporter.show(status())
    assert is_tame(capsys.readouterr().err)


def test_a_table_of_rows_is_tame_and_csv_and_json_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    value = HOSTILE.replace("\udcff", "")
    result = {"columns": ["id", "v\x1b["], "rows": [{"id": 1, "v\x1b[": value}]}
    print_result(result, "table")
    assert is_tame(capsys.readouterr().out)
    print_result(result, "csv")
    assert value in capsys.readouterr().out
    print_result(result, "json")
    out = capsys.readouterr().out
    assert "\\u001b" in out and "\x1b" not in out


def test_a_message_of_a_log_is_one_line() -> None:
    def record(error: Any = None) -> logging.LogRecord:
        return logging.LogRecord("headwater", logging.ERROR, "f", 1, "it is %s", (HOSTILE,), error)

    line = PlainFormatter("%(levelname)s %(message)s").format(record())
    assert line.startswith("ERROR it is [/b]") and "\n" not in line and is_tame(line)
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        text = PlainFormatter("%(message)s").format(record(sys.exc_info()))
    assert "\n    File " in text and is_tame(text)


FAILING = """
from headwater.cli import main
from headwater.cli.commands import app
from headwater.errors import DefiniteError

@app.command()
def failing():
    raise DefiniteError("X", "a \\x1b[2J name", detail="one\\ntwo \\x9b", hint="[/b]")

main()
"""


def test_an_error_of_a_command_is_tame() -> None:
    done = subprocess.run([sys.executable, "-c", FAILING, "failing"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: [X] a \\x1b[2J name\n  detail: one\ntwo \\x9b\n  hint: [/b]\n"


STOPPING = """
import signal, sys, time
from headwater.cli.commands import _Stopped, _stop_on_signals
from headwater.cli.live import Reporter

try:
    with _stop_on_signals(), Reporter() as reporter:
        print("ready", flush=True)
        time.sleep(30)
except _Stopped:
    sys.stderr.write("into the void")
    sys.stderr.flush()
    open(sys.argv[1], "w").write("stopped in order")
"""


@pytest.mark.parametrize("ignored", [False, True])
def test_sighup_stops_in_order_unless_whoever_started_us_ignores_it(tmp_path: Any, ignored: bool) -> None:
    def before() -> None:
        if ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    command = [sys.executable, "-c", STOPPING, str(tmp_path / "end")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=before, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    if ignored:
        time.sleep(0.5)
        assert process.poll() is None
        process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()
    assert (tmp_path / "end").read_text() == "stopped in order"


def test_a_terminal_that_is_closed_stops_in_order_too(tmp_path: Any) -> None:
    """What is said afterwards has nowhere to go, which is no error."""
    command = [sys.executable, "-c", STOPPING, str(tmp_path / "end")]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command[0], command)
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "end").read_text() == "stopped in order"
