"""An event loop whose time is virtual: a sleep takes no time, and one seed gives one order of events.

    ready callbacks ──► shuffled by the seed ──► run
    none ready      ──► the clock jumps to the next timer

Callbacks belong to the process (`in_process`) whose context they were made in. A frozen process stands still as after
SIGSTOP, its timers too; one that is never thawed is dead as after SIGKILL: no `finally` and no `except` of it runs.
`simulation.py` builds crashes and zombies from that. Threads and real I/O have no place in such a loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import selectors
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

PROCESS: Final[contextvars.ContextVar[str]] = contextvars.ContextVar("virtual_process", default="")
BURIAL_ROUNDS: Final = 20  # cancelled tasks may start others to clean up; more rounds than any of ours needs


class NothingLeftToHappen(RuntimeError):
    """Every task waits for another one: a deadlock, which real time would only show as silence."""


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for a time-out, moves the clock past it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeftToHappen("every task waits for another one")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """See the head of this module. Without a seed callbacks run in the order in which they became ready."""

    def __init__(self, seed: int | None = None) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._order = None if seed is None else random.Random(seed)
        self._frozen: dict[str, list[Any]] = {}
        self._clock_resolution = 1e-6  # sums of floats: a timer may come out a hair before its moment

    def time(self) -> float:
        return self._jumping.now_s

    def freeze(self, process: str) -> None:
        """None of its callbacks runs any more; one that runs now ends at its next await."""
        self._frozen.setdefault(process, [])

    def thaw(self, process: str) -> None:
        self._ready.extend(self._frozen.pop(process, []))  # type: ignore[attr-defined]

    def is_frozen(self, process: str) -> bool:
        return process in self._frozen

    def _run_once(self) -> None:
        # asyncio keeps its ready callbacks in `_ready` and its due timers in a heap that this moves there.
        self._hold_frozen()
        if self._order is not None and len(self._ready) > 1:  # type: ignore[attr-defined]
            ready = list(self._ready)  # type: ignore[attr-defined]
            self._order.shuffle(ready)
            self._ready.clear()  # type: ignore[attr-defined]
            self._ready.extend(ready)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]

    def _hold_frozen(self) -> None:
        if not self._frozen:
            return
        for queue in (self._ready, self._scheduled):  # type: ignore[attr-defined]
            mine = [h for h in queue if h._context.get(PROCESS, "") in self._frozen]
            if not mine:
                continue
            held = {id(h) for h in mine}
            rest = [h for h in queue if id(h) not in held]
            queue.clear()
            queue.extend(rest)
            if queue is self._scheduled:  # type: ignore[attr-defined]
                heapq.heapify(queue)
            for handle in mine:
                self._frozen[handle._context.get(PROCESS, "")].append(handle)

    def bury(self) -> None:
        """End everything, frozen processes too; the caller has disconnected them from whatever they could harm."""
        for process in list(self._frozen):
            self.thaw(process)
        for _ in range(BURIAL_ROUNDS):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=60.0))


def in_process(process: str, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that, with all that it starts, belongs to a process."""
    context = contextvars.copy_context()
    context.run(PROCESS.set, process)
    return asyncio.get_running_loop().create_task(coro, context=context)


def run(main: Coroutine[Any, Any, T], *, seed: int | None = None) -> T:
    """`asyncio.run` in virtual time."""
    loop = VirtualClockLoop(seed)
    # A task that nobody awaits any more may end with an error; reporting it would come whenever it is collected.
    loop.set_exception_handler(lambda _loop, _context: None)
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        try:
            loop.bury()
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
