"""Barriers while sources and tables come and go: a statement must not make an epoch fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from headwater.runtime.capture import Capture
from headwater.runtime.source_runtime import SourceRuntime


class FakeSource:
    """Calls `meanwhile` at each barrier, as a statement would be at work beside it."""

    def __init__(self, name: str, seen: list[str], meanwhile: Callable[[], Any] = lambda: None) -> None:
        self.name = name
        self.seen = seen
        self.meanwhile = meanwhile

    async def prepare(self, *_: Any) -> list[Any]:
        self.seen.append(self.name)
        self.meanwhile()
        return [(0, self.name)]

    async def finish(self, *_: Any) -> None:
        await self.prepare()


def test_a_source_that_is_made_or_dropped_during_a_barrier_does_not_fail_it() -> None:
    seen: list[str] = []
    capture = Capture(SimpleNamespace(slots=1))  # type: ignore[arg-type]
    sources: dict[int, Any] = capture.sources  # type: ignore[assignment]

    def come_and_go() -> None:
        sources[3] = FakeSource("new", seen)
        sources.pop(2, None)

    sources |= {1: FakeSource("first", seen, come_and_go), 2: FakeSource("dropped", seen)}
    assert asyncio.run(capture.prepare(*[None] * 3)) == [(0, "first")]  # type: ignore[arg-type]
    sources[4] = FakeSource("last", seen)
    asyncio.run(capture.finish(*[None] * 2))  # type: ignore[arg-type]
    assert seen == ["first", "first", "new", "last"]


def test_a_table_that_is_made_during_a_barrier_does_not_fail_it() -> None:
    source: Any = SimpleNamespace(tables={})
    source.tables[1] = SimpleNamespace(at_barrier=lambda *_: source.tables.update({2: None}))
    assert SourceRuntime._tasks(source, 0, 0, None, False) == []  # type: ignore[arg-type]
