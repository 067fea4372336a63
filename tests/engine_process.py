"""An engine as its users have it: `headwater run` in a process of its own, spoken to over HTTP and the command line.

The tests that use it are black-box: they know the interfaces of DESIGN.md section 10 and nothing of the inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

COMMAND: Final = [sys.executable, "-c", "from headwater.cli import main; main()"]
START_S: Final = 180.0  # Spark alone takes 10 s on an idle machine, and a minute on a loaded one


class SqlError(Exception):
    """What the engine answered instead of rows."""

    def __init__(self, error: Mapping[str, str], status: int) -> None:
        super().__init__(f"[{error['code']}] {error['message']} ({error['detail']})")
        self.code = error["code"]
        self.message = error["message"]
        self.detail = error["detail"]
        self.hint = error["hint"]
        self.status = status


def headwater(
    *arguments: str, data_dir: Path | None = None, timeout: float = START_S
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    extra = ["--data-dir", str(data_dir)] if data_dir is not None else []
    return subprocess.run(
        [*COMMAND, *arguments, *extra], capture_output=True, text=True, timeout=timeout, env=environment()
    )


def environment() -> dict[str, str]:
    return {**os.environ, "HEADWATER_DRIVER_MEMORY": "1g", "PYTHONUNBUFFERED": "1"}


class EngineProcess:
    """`headwater run` on a data directory; `start` returns when it takes statements."""

    def __init__(self, data_dir: Path, *arguments: str, file: Path | None = None, master: str = "local[2]") -> None:
        self.data_dir = data_dir
        self.log = data_dir.with_name(data_dir.name + ".log")
        files = [str(file)] if file is not None else []
        self.command = [*COMMAND, "run", *files, "--data-dir", str(data_dir), "--master", master, *arguments]
        self.process: subprocess.Popen[bytes] | None = None
        self.http: httpx.Client
        self.java: set[int] = set()

    def start(self, wrapper: tuple[str, ...] = ()) -> EngineProcess:
        (self.data_dir / "endpoint.json").unlink(missing_ok=True)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*wrapper, *self.command], stdout=out, stderr=out, env=environment(), start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not (self.data_dir / "endpoint.json").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the engine did not start: {self.output()}")
            time.sleep(0.1)
        endpoint = json.loads((self.data_dir / "endpoint.json").read_text())
        self.http = httpx.Client(
            base_url=endpoint["url"],
            headers={"Authorization": f"Bearer {endpoint['token']}"},
            timeout=180,
            trust_env=False,
        )
        self.java = {p.pid for p in self.children() if "java" in p.name()}
        return self

    def __enter__(self) -> EngineProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- statements -------------------------------------------------------------------------------------------------

    def sql(self, statement: str) -> list[dict[str, Any]]:
        """The rows of the last query among the statements."""
        answer = self.http.post("/sql", json={"statement": statement})
        content = answer.json()
        if "error" in content:
            raise SqlError(content["error"], answer.status_code)
        rows: list[dict[str, Any]] = content["rows"]
        return rows

    def epoch(self) -> int:
        """The epoch that a query reads now."""
        return int(self.http.post("/sql", json={"statement": "SELECT 1"}).json()["epoch"])

    def plan(self, query: str) -> str:
        return "\n".join(r["plan"] for r in self.sql(f"EXPLAIN {query}"))

    def spark_jobs(self, stage: str) -> int:
        """`headwater_spark_jobs_total{stage=…}`."""
        text = self.http.get("/metrics").text
        match = re.search(rf'^headwater_spark_jobs_total{{stage="{stage}"}} (\S+)$', text, re.MULTILINE)
        return int(float(match[1])) if match else 0

    def all_spark_jobs(self) -> int:
        text = self.http.get("/metrics").text
        return sum(int(float(n)) for n in re.findall(r"^headwater_spark_jobs_total{[^}]*} (\S+)$", text, re.MULTILINE))

    # -- life -------------------------------------------------------------------------------------------------------

    def children(self) -> list[psutil.Process]:
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return list(psutil.Process(self.process.pid).children(recursive=True))
        return []

    def kill(self) -> None:
        """kill -9 of the engine's own process, and of nothing else."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self.http.close()

    def stop(self, timeout: float = 60) -> int:
        """SIGTERM; gives the exit code. Ends everything by force if that takes too long."""
        if self.process is None:
            return 0
        family = self.children()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return self.process.returncode

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


@contextlib.contextmanager
def running(data_dir: Path, *arguments: str, **more: Any) -> Iterator[EngineProcess]:
    """An engine for the length of a block."""
    engine = EngineProcess(data_dir, *arguments, **more)
    try:
        yield engine.start()
    finally:
        engine.stop()


def wait_until(condition: Any, timeout: float = 60, what: str = "it") -> None:
    """Ask again and again until the condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {timeout} s")
        time.sleep(0.05)
