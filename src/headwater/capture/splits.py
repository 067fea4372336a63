"""Splits: half-open key ranges `[left, right)` of an external table, or physical ranges where key order is not ours.

A bound is the source's own text of each key column (a tuple of strings), so that it can be stored as JSON, shown, and
put back into a statement without loss; None is an open end. The first split is open to the left and the last one to the
right: every key, also one inserted later, belongs to exactly one split. The bounds are chosen by each connector's
`planner.py`. A read may take a part of its split only, a `Page`; what it leaves is a split of its own from then on.
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
WHOLE_UP_TO: Final = 2  # pages: a split that is not larger is read whole, so that no small rests are left
TOO_LONG: Final = 4  # pages: a read of more is given up when a limit comes, and made again as pages

Bound = tuple[str, ...]


def rows_per_split(wanted: int | None, rate_limit: int | None, readers: int) -> int:
    """How many rows a split is planned with: what the user wants, else the default, or fewer where a rate limit is in
    force, over all readers: else nothing would be seen of a slow copy for minutes."""
    if wanted:
        return wanted
    if not rate_limit:
        return DEFAULT_ROWS_PER_SPLIT
    return min(DEFAULT_ROWS_PER_SPLIT, paced_rows(rate_limit, readers))


def paced_rows(rate_limit: int, readers: int, least: int = LEAST_ROWS_PER_SPLIT) -> int:
    """How many rows one of several readers gets under a limit, in the time after which something is to be seen."""
    return max(least, rate_limit * LIMITED_SPLIT_S // max(1, readers))


@dataclass(frozen=True, slots=True)
class Page:
    """How much of a split one read takes: of a split with more than `most` rows the first `rows`, in its order; with
    `rows` 0 all of it, and `most` is what is expected. `most` 0: not known, and the read is never given up. No page is
    planned smaller than `least`."""

    most: int = 0
    rows: int = 0
    least: int = LEAST_ROWS_PER_SPLIT

    def too_long(self, rate_limit: int, readers: int) -> bool:
        """Whether a read that was begun so would show nothing for long under this limit."""
        return self.most > TOO_LONG * paced_rows(rate_limit, readers, self.least)


WHOLE: Final = Page()


class SplitKind(StrEnum):
    """What the bounds are. Set by the planner; stored with the split.

    KEY: values of the key columns, in an order that we reproduce: splits are handed over one by one.
    CTID: physical places: all splits of the table are handed over together.
    """

    KEY = "key"
    CTID = "ctid"


@dataclass(frozen=True, slots=True)
class Split:
    """One range of a table. `split_id` counts from 1 in the order of the ranges as planned; what a read left of one
    has the next free number."""

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
