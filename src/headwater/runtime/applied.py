"""The statements of pipeline files that create nothing: each runs once per data directory, whatever crashes.

What says that a statement has run is committed with what it changed: with its rows, its drop, its new settings. Where
a statement changed nothing of that kind, the mark has the checkpoint after it to itself; it may then run again after a
crash, which is no harm to one like PAUSE.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from headwater.storage.checkpoint import Contribution, States

if TYPE_CHECKING:
    from headwater.engine import EngineCore

NO_JOB: Final = 0  # the marks are states of the data directory itself


class AppliedStatements:
    """See the head of this module. `times`: the same text may stand in a file several times, and is meant so often."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def has_run(self, text: str, times: int) -> bool:
        return int(self.core.meta.state(NO_JOB, _part(text)) or 0) >= times

    async def run(self, text: str, times: int, *, preamble: str = "") -> None:
        """Durable when it returns. `preamble` (SET dialect) is said before the statement and is no part of the mark."""
        states = {(NO_JOB, _part(text)): times}
        await self.core.commands.execute(preamble + text, states)
        await self.settle(states)

    async def settle(self, states: States) -> None:
        await self.core.writes.settle()
        await self.core.main.request(contribution=Contribution(states=dict(states)))


def _part(text: str) -> str:
    words = " ".join(text.split())
    return "applied:" + hashlib.sha256(words.encode()).hexdigest()[:40]
