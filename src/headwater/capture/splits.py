"""Splits: half-open key ranges `[left, right)` of an external table, or physical ranges where key order is not ours.

A bound is the source's own text of each key column (a tuple of strings), so that it can be stored as JSON, shown, and
put back into a statement without loss; None is an open end. The first split is open to the left and the last one to the
right: every key, also one inserted later, belongs to exactly one split. The bounds are chosen by each connector's
`planner.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_SPLITS: Final = 10_000  # per table: each is a row of state in every checkpoint until it is handed over
DEFAULT_ROWS_PER_SPLIT: Final = 100_000
LIMITED_SPLIT_S: Final = 5  # a split of a copy with a rate limit: what is read is seen when its split is handed over
LEAST_ROWS_PER_SPLIT: Final = 100  # fewer would be more work for us and the server than the rows are

Bound = tuple[str, ...]


def rows_per_split(wanted: int | None, rate_limit: int | None, readers: int) -> int:
    """How many rows a split is planned with: what the user wants, else the default, or fewer where a rate limit is in
    force, over all readers: else nothing would be seen of a slow copy for minutes."""
    if wanted:
        return wanted
    if not rate_limit:
        return DEFAULT_ROWS_PER_SPLIT
    paced = rate_limit * LIMITED_SPLIT_S // max(1, readers)
    return min(DEFAULT_ROWS_PER_SPLIT, max(LEAST_ROWS_PER_SPLIT, paced))


class SplitKind(StrEnum):
    """What the bounds are. Set by the planner; stored with the split.

    KEY: values of the key columns, in an order that we reproduce: splits are handed over one by one.
    CTID: physical places: all splits of the table are handed over together.
    """

    KEY = "key"
    CTID = "ctid"


@dataclass(frozen=True, slots=True)
class Split:
    """One range of a table. `split_id` counts from 1 in the order of the ranges."""

    split_id: int
    left: Bound | None
    right: Bound | None
    kind: SplitKind = SplitKind.KEY

    def as_dict(self) -> dict[str, object]:
        return {"split_id": self.split_id, "left": self.left_json, "right": self.right_json, "kind": str(self.kind)}

    @property
    def left_json(self) -> str | None:
        return bound_json(self.left)

    @property
    def right_json(self) -> str | None:
        return bound_json(self.right)


def bound_json(bound: Bound | None) -> str | None:
    """The form in which hw_splits shows a bound: a JSON array of texts, NULL for an open end."""
    return None if bound is None else json.dumps(list(bound), ensure_ascii=False)


def bound_from_json(text: str | None) -> Bound | None:
    return None if text is None else tuple(json.loads(text))


def splits_between(bounds: Iterable[Sequence[str]], kind: SplitKind = SplitKind.KEY) -> list[Split]:
    """The splits that inner bounds (ascending, repeated ones allowed) cut the key space into; none gives one split."""
    inner: list[Bound] = []
    for bound in bounds:
        if not inner or inner[-1] != tuple(bound):
            inner.append(tuple(bound))
    ends: list[Bound | None] = [None, *inner, None]
    return [Split(i + 1, ends[i], ends[i + 1], kind) for i in range(len(ends) - 1)]
