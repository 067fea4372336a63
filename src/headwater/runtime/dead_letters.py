"""Rows that a target refused, from the task that found them to the list of dead letters.

A batch's letters count if the batch is in the target. Between the target's commit and our next checkpoint that is known
to the target alone, so a batch with letters is noted with a checkpoint *before* its commit:

    {"epoch": the batch's last, "letters": [[file, rows], …]}      after a crash: the target is there: they count
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PendingDeadLetters:
    """The letters of a batch that is being committed (epoch 0: none is)."""

    epoch: int = 0
    letters: tuple[tuple[str, int], ...] = ()

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.letters)

    def as_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "letters": [list(x) for x in self.letters]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> PendingDeadLetters:
        return cls(int(data["epoch"]), _pairs(data["letters"])) if data else cls()


def held(epoch: int, letters: Iterable[Any]) -> PendingDeadLetters:
    return PendingDeadLetters(epoch, _pairs(letters))


def letter_rows(sink_id: int, letters: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    """As the meta store lists them."""
    return [
        {
            "sink_id": sink_id,
            "at": time.time(),
            "code": "SINK_ROW_REFUSED",
            "reason": "the target refused these rows",
            "path": path,
            "rows": rows,
        }
        for path, rows in letters
    ]


def _pairs(letters: Iterable[Any]) -> tuple[tuple[str, int], ...]:
    return tuple((str(path), int(rows)) for path, rows in letters)
