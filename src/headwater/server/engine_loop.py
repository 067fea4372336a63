"""From the server's event loop to the engine's, which is another one, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from headwater.errors import HeadwaterError, TransientError

T = TypeVar("T")
CALL_S: Final = 10.0  # for what is answered from memory: by then the engine's loop stands
LAST_WORD_S: Final = 0.4  # for a statement that is cancelled to say why


class EngineLoop:
    """`loop` None: the backend lives in the loop that asks."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop

    async def call(self, function: Callable[[], T]) -> T:
        """A function that does not wait, run over there."""
        if self._loop is None:
            return function()

        async def called() -> T:
            return function()

        try:
            return await asyncio.wait_for(self.run(called), CALL_S)
        except TimeoutError:
            raise TransientError("ENGINE_BUSY", "the engine does not answer", hint="/healthz says why") from None

    async def run(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """A coroutine, run over there. Cancelled here, it is cancelled there; an error that it then ends with is
        raised here."""
        if self._loop is None:
            return await function()
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[None]] = []

        async def there() -> None:
            try:
                outcome.set_result(await function())
            except BaseException as error:
                outcome.set_exception(error)

        self._loop.call_soon_threadsafe(lambda: tasks.append(asyncio.ensure_future(there())))
        waiting = asyncio.wrap_future(outcome)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not outcome.done():
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            await asyncio.wait({waiting}, timeout=LAST_WORD_S)
            if waiting.done() and isinstance(error := _error_of(waiting), HeadwaterError):
                raise error from None
            raise


def _error_of(future: asyncio.Future[Any]) -> BaseException | None:
    return None if future.cancelled() else future.exception()
