"""The end of a command's process: it has its exit code, whatever still runs and whoever has stopped reading."""

from __future__ import annotations

import subprocess
import sys
import time

PROGRAM = """
import threading, time, typer
from concurrent.futures import ThreadPoolExecutor
from headwater.cli import main
from headwater.cli.commands import app

@app.command()
def stuck():
    # As the engine's: made by a daemon, and so daemons, for which Python waits all the same.
    maker = threading.Thread(target=lambda: ThreadPoolExecutor(1).submit(time.sleep, 60), daemon=True)
    maker.start()
    maker.join()
    print("done")
    raise typer.Exit(1)

@app.command()
def talkative():
    while True:
        print("x" * 1000)

main()
"""


def test_a_thread_that_cannot_be_stopped_does_not_hold_the_process() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROGRAM, "stuck"], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (1, "done\n")
    assert time.monotonic() - began < 40


def test_a_reader_that_has_enough_is_no_error_of_ours() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "talkative"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(50) == 1
