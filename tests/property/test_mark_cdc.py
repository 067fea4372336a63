"""The vectorised hand-over rule gives what the plain one gives, for any splits, keys, positions and reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.backfill.cdc.mark import DROP, Ranges, mark_cdc_chunk, mark_cdc_event, split_index

AFTER = st.one_of(st.integers(0, 20), st.just(DROP))
INT_KEY = st.tuples(st.integers(-5, 15))
PAIR_KEY = st.tuples(st.text("abé~", max_size=3), st.integers(0, 3))


@st.composite
def case(draw: Any, keys: Any) -> tuple[Ranges, list[Any], list[int], list[frozenset[int]]]:
    bounds = tuple(sorted(draw(st.sets(keys, max_size=5)), key=_bytes_order))
    after = tuple(draw(st.lists(AFTER, min_size=len(bounds) + 1, max_size=len(bounds) + 1)))
    reading = draw(st.sets(st.integers(0, len(bounds)), max_size=3))
    events = draw(st.lists(st.tuples(keys, st.integers(1, 25)), max_size=30))
    seen = [draw(st.frozensets(st.sampled_from(sorted(reading)))) if reading else frozenset() for _ in events]
    return Ranges(bounds, after), [k for k, _ in events], [lsn for _, lsn in events], seen


def _bytes_order(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(v.encode() if isinstance(v, str) else v for v in key)


def check(found: Any, types: list[pa.DataType]) -> None:
    ranges, keys, commits, seen = found
    columns = [pa.array([k[i] for k in keys], kind) for i, kind in enumerate(types)]
    splits = {s for events in seen for s in events}
    masks = {s: np.array([s in events for events in seen], bool) for s in splits}
    # The plain form compares as Python does; for text that is the order of code points, and of UTF-8 bytes.
    expected = [mark_cdc_event(k, c, ranges, s) for k, c, s in zip(keys, commits, seen, strict=True)]
    assert mark_cdc_chunk(columns, commits, ranges, masks).tolist() == expected


@settings(max_examples=300, deadline=None)
@given(case(INT_KEY))
def test_marking_a_chunk_is_marking_each_event_for_integer_keys(found: Any) -> None:
    check(found, [pa.int64()])


@settings(max_examples=300, deadline=None)
@given(case(PAIR_KEY))
def test_marking_a_chunk_is_marking_each_event_for_composite_text_keys(found: Any) -> None:
    check(found, [pa.string(), pa.int32()])


def test_a_key_that_equals_a_bound_is_in_the_split_that_begins_there() -> None:
    keys = [pa.array([9, 10, 11, 19, 20])]
    assert split_index(keys, [(10,), (20,)]).tolist() == [0, 1, 1, 1, 2]


def test_keys_far_beyond_the_last_bound_are_in_the_last_split() -> None:
    assert split_index([pa.array([-(2**62), 2**62])], [(10,), (20,)]).tolist() == [0, 2]
