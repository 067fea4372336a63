"""Spark's executors, as they come and go: how many slots there are, whether they share the data directory, whether
there are any at all.

    first()   before anything is made or resumed: every executor sees the engine's own data directory
    watch()   slots follow the executors; more of them are asked the same; without any, status says so

On one machine (`local[…]`) nothing of this can change. Elsewhere an executor that joins between two looks is not
waited for: its tasks look for the engine's mark themselves (`storage/shared.py`), and fail without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from headwater.errors import HeadwaterError
from headwater.storage.shared import NOT_SHARED

if TYPE_CHECKING:
    from headwater.engine import EngineCore

log = logging.getLogger(__name__)
WATCH_S: Final = 2.0
FIRST_S: Final = 10.0  # how long a start waits for a first executor before it says that it waits


class Executors:
    """Those of one engine. `slots` is how many tasks run at once; `waiting_for` is empty while there is one."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.local = core.master.startswith("local[") or core.master == "local"
        self.slots = core.jobs.slots()
        self.waiting_for = ""
        self.known: frozenset[str] = frozenset()  # the driver and the executors
        self._asked: frozenset[str] = frozenset()  # those of them that share the data directory
        self._asking: asyncio.Task[None] | None = None

    async def first(self) -> bool:
        """Whether all that are there share the data directory, if any has come soon; TransientError if one does not."""
        if self.local:
            return True
        self._ask()
        assert self._asking is not None
        await asyncio.wait({self._asking}, timeout=FIRST_S)
        if not self._asking.done():
            await self._look()
            return False
        await self._asking
        return True

    async def arrived(self) -> None:
        """When those that have come, however late, are known to share the data directory."""
        if self._asking is not None:
            await self._asking

    def _ask(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._all_share(), name="asks executors")

    async def _all_share(self) -> None:
        """Again until all are asked that there are: more may come while some answer."""
        from headwater.spark.query import explained
        from headwater.spark.shared import require_shared

        def work() -> None:
            with explained("SPARK_FAILED"):
                require_shared(self.core.spark, self.core.data_dir, self.slots)

        while True:
            asked = self.known
            await self.core.jobs.run("query", "shared", work)
            await self._look()
            # The first job waits for the first executor, and may then have gone to one of several.
            if self.known == asked:
                self._asked = asked
                return

    async def watch(self) -> None:
        while not self.local:
            await asyncio.sleep(WATCH_S)
            with contextlib.suppress(Exception):  # of a driver that is gone: `_watch_spark` says so
                await self._look()
            if self.known - self._asked:
                self._ask()
            self._take_answer()

    async def _look(self) -> None:
        self.known = await asyncio.to_thread(self.core.jobs.executors)
        slots = await asyncio.to_thread(self.core.jobs.slots)
        self.waiting_for = "" if len(self.known) > 1 else self._none()
        if slots != self.slots:
            log.info("Spark has %d slots, before %d", slots, self.slots)
            self.slots = slots
            self.core.slots_changed()

    def _take_answer(self) -> None:
        if self._asking is None or not self._asking.done() or self._asking.cancelled():
            return
        error, self._asking = self._asking.exception(), None
        if isinstance(error, HeadwaterError) and error.code == NOT_SHARED:
            self.core.die(error)
        elif error is not None:  # an executor was lost meanwhile, say: the next look asks again
            log.warning("executors could not be asked: %s", type(error).__name__)

    def _none(self) -> str:
        return f"Spark has no executors: start workers of {self.core.master}"

    async def stop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # Spark may be gone: the stop goes on
                await self._asking
