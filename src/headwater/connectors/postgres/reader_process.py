"""The engine's end of a reader process: starts it, keeps it alive, knows its position, passes acknowledgements on.

`reader.py` is the process. It is started again with back-off whenever it dies; after a definite error it is not, and
whoever waits for a position gets that error. The password goes through its stdin, never into argv or the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from headwater.capture.spool import TARGET_FILE_BYTES
from headwater.config import resolve_secret
from headwater.connectors.postgres.client import PostgresConfig
from headwater.connectors.postgres.slots import membership_token
from headwater.errors import HeadwaterError, SourceError, TransientError
from headwater.storage.private import UMASK

BACKOFF_S: Final = (0.1, 5.0)
STOP_WAIT_S: Final = 3.0
EVENT_BYTES: Final = 16 << 20  # the longest event names every table of the publication, about 20 bytes each


class ReaderProcess:
    """One reader of one slot. `position` is what its spool holds durably; it never goes back.

    `start_lsn` is where a new spool begins (None: where the slot stands), `acknowledged` the committed position after a
    restart of the engine, `file_bytes` the size at which the spool begins another file. `on_change` is called (in the
    event loop) after every event.
    """

    def __init__(
        self,
        config: PostgresConfig,
        directory: Path | str,
        *,
        start_lsn: int | None = None,
        acknowledged: int = 0,
        file_bytes: int = TARGET_FILE_BYTES,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._directory = Path(directory)
        self._start_lsn = start_lsn
        self._file_bytes = file_bytes
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._changed = asyncio.Condition()
        self._nudged = 0
        self._stopping = False
        self.acknowledged = acknowledged
        self.position = 0
        self.server_lsn = 0  # the end of the server's log when it was last asked: at connecting and every heartbeat
        self.bytes_received = 0
        self.connected = False
        self.last_error: HeadwaterError | None = None
        self.bulk_messages = 0  # how many came as a backlog, read in bulk
        self._publication: dict[str, Any] | None = None

    def membership(self, table_oid: int, schema_oid: int = 0) -> str | None:
        """Which entry of the publication has the table, as `slots.membership` gives it; None: it is not published.

        Another entry than before says that the table was taken out and put in again: it needs a resync. Known at the
        latest one heartbeat interval after the change.
        """
        return membership_token(self._publication, table_oid, schema_oid) if self._publication else None

    @property
    def knows_publication(self) -> bool:
        """The reader has looked at the publication since it was started."""
        return self._publication is not None

    @property
    def unread_bytes(self) -> int:
        """By how much the server's log was ahead of the spool when it was last asked; what of it is ours, it knows."""
        return max(0, self.server_lsn - max(self.position, self.acknowledged))

    @property
    def failed(self) -> bool:
        """A definite error has ended the reader."""
        return isinstance(self.last_error, SourceError)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the process and keep it alive; may be called again after a definite error was dealt with."""
        if self._task is not None and not self._task.done():
            return
        self._stopping, self.last_error = False, None
        self._task = asyncio.create_task(self._supervise(), name=f"reader {self._config.slot}")

    async def stop(self) -> None:
        """End the process in order, by force after a few seconds."""
        self._stopping = True
        await self._notify()
        if self._task is None:
            return
        self._send({"stop": True})
        try:
            await asyncio.wait_for(asyncio.shield(self._task), STOP_WAIT_S)
        except TimeoutError:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._task = None

    def ack(self, lsn: int) -> None:
        """A checkpoint has made everything up to `lsn` durable (I3)."""
        if lsn > self.acknowledged:
            self.acknowledged = lsn
            self._send({"ack": lsn})

    def nudge(self, lsn: int) -> None:
        """Let the position reach `lsn` soon, also on a server where nothing happens."""
        if lsn > max(self.position, self._nudged):
            self._nudged = lsn
            self._send({"nudge": lsn})

    async def wait_for(self, lsn: int) -> None:
        """Return when the position has reached `lsn`; raises the reader's definite error if it ends before.

        A reader that is not started yet is waited for; one that is stopped meanwhile is a TransientError.
        """
        self.nudge(lsn)
        async with self._changed:
            await self._changed.wait_for(lambda: self.position >= lsn or self.failed or self._stopping)
        if self.position >= lsn:
            return
        if self.failed and self.last_error is not None:
            raise self.last_error
        raise TransientError("READER_STOPPED", f"the reader of slot {self._config.slot} was stopped")

    # -- the process ------------------------------------------------------------------------------------------------

    def _first_line(self) -> dict[str, Any]:
        config = self._config
        return {
            "conninfo": config.conninfo(password=resolve_secret(config.password)),
            "slot": config.slot,
            "publication": config.publication,
            "directory": str(self._directory),
            "start_lsn": self._start_lsn,
            "acknowledged": self.acknowledged,
            "heartbeat_s": config.heartbeat_ms / 1000,
            "file_bytes": self._file_bytes,
        }

    def _send(self, message: dict[str, Any]) -> None:
        process = self._process
        if process is not None and process.returncode is None and process.stdin is not None:
            # A process that is just dying gets the same by its first line when it is started again.
            with contextlib.suppress(ConnectionError, RuntimeError):
                process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _supervise(self) -> None:
        failures = 0
        while not self._stopping:
            before = self.position
            await self._run_once()
            self.connected = False
            await self._notify()
            if self.failed or self._stopping:
                return
            failures = 0 if self.position > before else failures + 1
            low, high = BACKOFF_S
            await asyncio.sleep(min(high, low * 2 ** min(failures, 10)) * random.uniform(0.5, 1.0))

    async def _run_once(self) -> None:
        try:
            first_line = self._first_line()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "headwater.connectors.postgres.reader",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=EVENT_BYTES,
                umask=UMASK,
                start_new_session=True,  # signals of a terminal are for the engine, which ends its readers in order
            )
        except HeadwaterError as error:
            self.last_error = TransientError(error.code, error.message, hint=error.hint)
            return
        except OSError as error:
            self.last_error = TransientError("READER_NOT_STARTED", f"the reader cannot be started: {error.strerror}")
            return
        self._process = process
        try:
            self._send(first_line)
            if self._nudged > self.position:
                self._send({"nudge": self._nudged})
            if self._stopping:
                self._send({"stop": True})
            assert process.stdout is not None
            async for line in process.stdout:
                if line.endswith(b"\n"):  # what a killed process was just writing is no event
                    await self._event(json.loads(line))
            code = await process.wait()
            if code != 0 and self.last_error is None:
                self.last_error = TransientError("READER_DIED", f"the reader ended with code {code}; it is restarted")
        finally:
            # The process ends by itself when its stdin closes, also if we are cancelled.
            if process.stdin is not None:
                process.stdin.close()

    async def _event(self, event: dict[str, Any]) -> None:
        match event.get("event"):
            case "connected":
                self.connected, self.last_error = True, None
                self.server_lsn = event["server_lsn"]
            case "server":
                self.server_lsn = event["lsn"]
            case "position":
                self.position = max(self.position, event["durable_lsn"])
                self.bytes_received = event["bytes"]
            case "publication":
                self._publication = event
            case "backlog":
                self.bulk_messages += event["messages"]
            case "error":
                kind = TransientError if event["transient"] else SourceError
                self.connected = False
                self.last_error = kind(event["code"], event["message"], hint=event.get("hint", ""))
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
        if self._on_change is not None:
            self._on_change()
