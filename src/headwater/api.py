"""Headwater from Python: `with headwater.Engine(data_dir) as engine: engine.sql("…")`.

Blocking, from any thread; the engine itself (`engine.py`) runs on an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, Final

from headwater.engine import EngineCore
from headwater.errors import HeadwaterError
from headwater.runtime.result import Result
from headwater.server.endpoint import parse_address
from headwater.storage.location import data_directory

STOP_LIMIT_S: Final = 9.0  # a stop ends within 10 s; what does not is left behind with the process


class Table:
    """A table or view of a running engine, for Python."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self.name = name

    def df(self, epoch: int | None = None) -> Any:
        """Its rows at an epoch (the last committed one by default), as a Spark DataFrame.

        What it reads is kept as long as the DataFrame itself is.
        """
        core = self._engine.core
        job = core.registry.find(self.name, "table", "view")
        if epoch is None:
            self._engine.call(core.writes.settle())
        return core.queries.table_frame(job, epoch)

    def changes(self, from_epoch: int, to_epoch: int) -> Any:
        """The changes of the epochs in (from_epoch, to_epoch], with `_change_type` and `_commit_version`."""
        name = self.name.replace("\\", "\\\\").replace("'", "\\'")
        return self._engine.sql(f"SELECT * FROM table_changes('{name}', {int(from_epoch)}, {int(to_epoch)})")


class Engine:
    """An engine in this process: `with Engine(data_dir) as engine: engine.sql("…")`. Blocking, from any thread."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *,
        master: str | None = None,
        settings: Mapping[str, str] | None = None,
        meta_url: str | None = None,
        http: str = "127.0.0.1:0",
        spark_conf: Mapping[str, str] | None = None,
        allow_python: bool = False,
    ) -> None:
        """`allow_python`: over the endpoint, too, statements may bring code; those of this object always may."""
        # Absolute at once: the process may go elsewhere before it starts.
        self._arguments = (str(data_directory(data_dir)), master, dict(settings or {}), meta_url, http)
        self._spark_conf = dict(spark_conf or {})
        self._allow_python = allow_python
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()
        self._ready: Future[None] = Future()
        self.core: EngineCore
        self._loop: asyncio.AbstractEventLoop

    def __enter__(self) -> Engine:
        self._thread = threading.Thread(target=self._main, name="headwater", daemon=True)
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:  # also what a signal's handler raises
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._begun.wait()
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself meanwhile
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout=STOP_LIMIT_S)

    @property
    def stopped(self) -> bool:
        """False before it has come down; something that could not be stopped in time may still hold it up."""
        return self._thread is None or not self._thread.is_alive()

    def _main(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        data_dir, master, settings, meta_url, http = self._arguments
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._begun.set()
        try:
            host, port = parse_address(http)
            self.core = EngineCore(
                data_dir,
                master=master,
                settings=settings,
                meta_url=meta_url,
                spark_conf=self._spark_conf,
                allow_python=self._allow_python,
            )
        except BaseException as error:
            self._ready.set_exception(error)
            return
        stopping = asyncio.create_task(self._stopping.wait())
        starting = asyncio.create_task(self.core.start(http_host=host, http_port=port))
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
        try:
            await starting
        except BaseException as error:
            with contextlib.suppress(Exception):
                await self.core.stop()
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        ends: list[asyncio.Future[Any]] = [stopping, self.core.fatal]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await self.core.stop()

    def call(self, work: Any) -> Any:
        """Run a coroutine on the engine's loop and wait for it; the error that ended the engine, if that ends it."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except CancelledError:
            if self.fatal is not None:
                raise self.fatal from None
            raise

    @property
    def fatal(self) -> HeadwaterError | None:
        """The error that ended the engine, if one did."""
        return self.core.fatal.result() if self.core.fatal.done() else self.core.owner.fenced

    def sql(self, text: str) -> Any:
        """Run statements; a Spark DataFrame if the last is a query, else None."""
        return self.call(self.core.commands.frame(text))

    def execute(self, text: str) -> list[Result | None]:
        """Run statements; the rows of each query, None for other statements."""
        found: list[Result | None] = self.call(self.core.commands.execute(text))
        return found

    def table(self, name: str) -> Table:
        return Table(self, name)

    def register_udf(self, name: str, function: Callable[..., Any], return_type: str) -> None:
        """A Python function for queries and views of this engine."""
        self.core.functions.register(name, function, return_type)

    def caught_up(self) -> bool:
        """Whether every job is live and every sink has what is committed."""

        async def read() -> bool:
            return self.core.caught_up()

        return bool(self.call(read()))

    def given_up(self) -> bool:
        """Whether a job has failed that will not go on by itself."""

        async def read() -> bool:
            return self.core.given_up()

        return bool(self.call(read()))

    def status(self) -> dict[str, Any]:
        async def read() -> dict[str, Any]:
            return self.core.status()

        found: dict[str, Any] = self.call(read())
        return found
