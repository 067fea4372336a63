"""The hand-over rule: which events of the stream belong into an epoch. One pure function, and its vectorised form.

At the barrier of epoch N with position P(N), the events up to P(N) are judged by the split that their key is in:

    split was handed over before N    pass, if the event is after P(N-1)
    split is handed over in N         pass, if the split's read had not seen the event's transaction
    any other split                   drop: the split's own read, or its hand-over, will have it

`after` is P(N-1) for the first kind, and for the second the position just before the first transaction that the read
had not seen: nothing before it can pass, so the spool need not be looked at there. Of the rest `seen` decides, by
transaction: a staged row is then exactly what the first event that passes found, so a large value which that event left
out as unchanged is the staged one. (Two transactions that touch one row end in the order in which they become visible,
because the second waits for the first one's lock: what the read had seen is never younger than what it had not.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

DROP: Final = (1 << 63) - 1  # no event is after this


@dataclass(frozen=True, slots=True)
class Ranges:
    """The splits of a table as the rule sees them: `bounds` are the inner ones, ascending; `after[i]` belongs to the
    i-th split. One split without bounds is the whole table.
    """

    bounds: tuple[tuple[Any, ...], ...]
    after: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.after) != len(self.bounds) + 1:
            raise ValueError("one more split than inner bounds")


def mark_cdc_event(key: tuple[Any, ...], commit_end: int, ranges: Ranges, seen_by: Collection[int] = ()) -> bool:
    """Whether one event passes; `seen_by` are the splits whose read had seen its transaction.

    The plain form, which the tests hold `mark_cdc_chunk` equal to.
    """
    split = sum(1 for bound in ranges.bounds if bound <= key)
    return commit_end > ranges.after[split] and split not in seen_by


def mark_cdc_chunk(
    keys: Sequence[pa.Array], commit_end: Any, ranges: Ranges, seen: Mapping[int, Any] | None = None
) -> Any:
    """Whether each event passes: `keys` are the key columns, in key order; gives a boolean array.

    `seen` has, by the index of a split that is handed over now, whether its read had seen each event's transaction.
    """
    after = np.asarray(ranges.after, np.int64)
    commit_end = np.asarray(commit_end, np.int64)
    if len(after) == 1:
        passes = commit_end > after[0]
        return passes & ~seen[0] if seen and 0 in seen else passes
    if not seen and (after == after[0]).all():
        return commit_end > after[0]
    split = split_index(keys, ranges.bounds)
    passes = commit_end > after[split]
    for index, known in (seen or {}).items():
        passes &= ~((split == index) & known)
    return passes


def split_index(keys: Sequence[pa.Array], bounds: Sequence[tuple[Any, ...]]) -> Any:
    """The index of the split that each key is in: the number of bounds at or below it, by one sort of both together."""
    count = len(keys[0])
    columns = {}
    for i, column in enumerate(keys):
        edge = pa.array([b[i] for b in bounds], column.type)
        columns[f"k{i}"] = pa.concat_arrays([edge, _plain(column)])
    # A key that equals a bound belongs to the split that begins there: bounds sort first.
    columns["edge"] = pa.array(np.concatenate([np.zeros(len(bounds), np.int8), np.ones(count, np.int8)]))
    order = pc.sort_indices(pa.table(columns), sort_keys=[(name, "ascending") for name in columns]).to_numpy()
    is_bound = order < len(bounds)
    below = np.cumsum(is_bound)
    index = np.empty(count, np.int64)
    index[order[~is_bound] - len(bounds)] = below[~is_bound]
    return index


def _plain(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
