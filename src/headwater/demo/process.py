"""The demo's engine: a process of its own, as a user would run it (`headwater run FILE`), so that it can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import psutil

from headwater.cli.client import RemoteSession, running_engine
from headwater.errors import DefiniteError, HeadwaterError, TransientError

START_TIMEOUT_S: Final = 180.0  # Spark's start on a machine that does much else
STOP_TIMEOUT_S: Final = 20.0
LOG_TAIL: Final = 2000
# More task slots than a small machine has cores: a slowed-down copy sleeps in its slots, and must not hold up the rest.
MASTER: Final = "local[4]"


class EngineProcess:
    """Starts, asks, kills and stops an engine on one data directory."""

    def __init__(self, pipeline: Path, data_dir: Path, log: Path, environment: dict[str, str]) -> None:
        self.pipeline = pipeline
        self.data_dir = data_dir
        self.log = log
        self.page = ""
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._children: list[psutil.Process] = []
        self._session: RemoteSession | None = None

    def start(self) -> None:
        """Start it and return when it answers."""
        command = [sys.executable, "-m", "headwater.cli", "--verbose", "run", str(self.pipeline)]
        command += ["--data-dir", str(self.data_dir), "--master", MASTER]
        with open(self.log, "ab") as output:
            # A session of its own: ctrl-C in the terminal is for the demo, which then stops the engine.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self._check_alive()
            endpoint = running_engine(self.data_dir)
            # A file that a killed engine left behind names another process.
            if endpoint is not None and endpoint.pid == self._process.pid:
                self.page = endpoint.page
                self._session = RemoteSession(endpoint)
                return
            time.sleep(0.2)
        raise self._failed("the engine did not answer in time")

    def status(self) -> dict[str, Any]:
        self._check_alive()
        return self._ask().status()

    def run(self, statement: str) -> list[dict[str, Any]]:
        """The rows of a query, nothing for other statements."""
        self._check_alive()
        result = self._ask().run(statement)
        return result["rows"] if result else []

    def kill(self) -> int:
        """kill -9 of the engine alone; what it had started must notice by itself, and is waited for."""
        assert self._process is not None
        pid = self._process.pid
        self._children = _children(pid)
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._session = None
        psutil.wait_procs(self._children, timeout=STOP_TIMEOUT_S)
        return pid

    def stop(self) -> None:
        """In order if it can, by force if it does not; nothing of it is left."""
        process, self._process, self._session = self._process, None, None
        children = self._children
        if process is not None:
            children = [*children, *_children(process.pid)]
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        _, alive = psutil.wait_procs(children, timeout=5)
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._children = []

    def _ask(self) -> RemoteSession:
        if self._session is None:
            raise TransientError("ENGINE_GONE", "the engine does not run")
        return self._session

    def _check_alive(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise self._failed(f"the engine ended with exit code {self._process.returncode}")

    def _failed(self, what: str) -> HeadwaterError:
        tail = self.log.read_text(errors="replace")[-LOG_TAIL:].strip() if self.log.exists() else ""
        return DefiniteError("DEMO_ENGINE_FAILED", what, detail=tail, hint="run the demo again")


def _children(pid: int) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found
