"""Unchanged TOAST values are filled from the row as it was; a plain twin applies the events one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.spark.toast import Events, Filling, Missing, Overtaken

Event = tuple[int, str, str, str | None, bool]  # op, key, key before, value, value left out


def as_events(events: list[Event], known: list[bool] | None = None) -> Events:
    rows = pa.table(
        {
            "k": pa.array([e[1] for e in events], pa.string()),
            "v": pa.array([e[3] for e in events], pa.string()),
            "_op": pa.array([e[0] for e in events], pa.int8()),
            "_hw_xid": pa.array(range(len(events)), pa.int64()),
        }
    )
    before = pa.table({"k": pa.array([e[2] for e in events], pa.string())})
    mask = np.array([e[4] for e in events], bool)
    return Events(rows, before, {"v": mask} if mask.any() else {}, np.array(known or [True] * len(events), bool))


def as_rows(stored: dict[str, str]) -> pa.Table:
    return pa.table({"k": pa.array(stored.keys(), pa.string()), "v": pa.array(stored.values(), pa.string())})


def fill(events: list[Event], stored: dict[str, str]) -> list[str | None]:
    filled = Filling(as_events(events), None, ("k",)).filled(as_rows(stored), ())
    return list(filled.column("v").to_pylist())


def final(events: list[Event], values: list[str | None]) -> dict[str, str | None]:
    table: dict[str, str | None] = {}
    for event, value in zip(events, values, strict=True):
        if event[0] == 2:
            table.pop(event[1], None)
        else:
            table[event[1]] = value
    return table


@st.composite
def history(draw: Any) -> tuple[list[Event], dict[str, str], dict[str, str]]:
    """Legal events over three keys, the table before, and the table after by the plain twin."""
    before = draw(st.dictionaries(st.sampled_from("abc"), st.text("xyz", max_size=2)))
    table, events = dict(before), []
    for _ in range(draw(st.integers(0, 12))):
        key = draw(st.sampled_from("abc"))
        value = draw(st.text("xyz", max_size=2))
        if key not in table:
            table[key] = value
            events.append((1, key, key, value, False))
            continue
        match draw(st.sampled_from(["update", "touch", "delete", "move"])):
            case "update":
                table[key] = value
                events.append((1, key, key, value, False))
            case "touch":
                events.append((1, key, key, None, True))
            case "delete":
                del table[key]
                events.append((2, key, key, None, False))
            case "move":
                free = sorted(set("abc") - set(table))
                if free:
                    table[free[0]] = table.pop(key)
                    events += [(2, key, key, None, False), (1, free[0], key, None, True)]
    return events, before, table


@settings(max_examples=200, deadline=None)
@given(history())
def test_filled_events_lead_to_the_table_that_the_plain_twin_has(found: Any) -> None:
    events, before, after = found
    if not any(e[4] for e in events):
        return
    touched = {e[1] for e in events}
    assert final(events, fill(events, before)) == {k: v for k, v in after.items() if k in touched}


@settings(max_examples=200, deadline=None)
@given(history(), st.integers(1, 40))
def test_events_filled_piece_by_piece_lead_to_the_same_table(found: Any, limit: int) -> None:
    events, before, after = found
    table, done = dict(before), 0
    for piece in as_events(events).pieces({"v": 10.0}, float(limit)):
        part = events[done : done + len(piece)]
        values = fill(part, table) if piece.unchanged else [e[3] for e in part]
        assert piece.rows.column("k").to_pylist() == [e[1] for e in part]
        for event, value in zip(part, values, strict=True):
            table.pop(event[1], None)
            if event[0] == 1:
                table[event[1]] = str(value)
        done += len(piece)
    assert (table, done) == (after, len(events))


def test_pieces_are_bounded_by_what_is_filled_in_and_keep_a_change_of_key_together() -> None:
    touches: list[Event] = [(1, str(i), str(i), None, True) for i in range(100)]
    assert [len(p) for p in as_events(touches).pieces({"v": 1e6}, 1e7)] == [10] * 10
    assert [len(p) for p in as_events(touches).pieces({"v": 1.0}, 1e7)] == [100]
    moves: list[Event] = []
    for i in range(9):
        moves += [(2, str(i), str(i), None, False), (1, f"{i}x", str(i), None, True)]
    assert all(p.rows.column("_op")[-1].as_py() == 1 for p in as_events(moves).pieces({"v": 1e6}, 1e6))


def test_a_value_that_nobody_has_must_be_read_at_the_source() -> None:
    with pytest.raises(Missing) as raised:
        fill([(1, "a", "a", None, True)], {})
    assert raised.value.keys.column("k").to_pylist() == ["a"]


@st.composite
def moves(draw: Any) -> tuple[list[tuple[str, str, str | None]], int, dict[str, str]]:
    """(from, to, new value) over handed-over keys abc and others xy; "" from: insert, to: delete. And where P is."""
    keys = "abcxy"
    table = {k: k + k for k in draw(st.sets(st.sampled_from(keys), min_size=2, max_size=3))}
    before, history = dict(table), []
    for number in range(draw(st.integers(1, 10))):
        key = draw(st.sampled_from(keys))
        value = f"v{number}"
        if key not in table:
            history.append(("", key, value))
            table[key] = value
            continue
        kind = draw(st.sampled_from(["update", "touch", "delete", "move", "move", "change"]))
        free = sorted(set(keys) - set(table))
        if kind == "delete":
            history.append((key, "", None))
            del table[key]
        elif kind in ("move", "change") and free:
            target = draw(st.sampled_from(free))
            history.append((key, target, value if kind == "change" else None))
            table[target] = value if kind == "change" else table.pop(key)
            table.pop(key, None)
        elif kind in ("update", "touch"):
            history.append((key, key, value if kind == "update" else None))
            table[key] = value if kind == "update" else table[key]
    return history, draw(st.integers(0, len(history))), before


def halves(history: list[tuple[str, str, str | None]], passing: str) -> tuple[list[Event], list[bool]]:
    events: list[Event] = []
    known: list[bool] = []
    for old, new, value in history:
        if old and old != new and old in passing:
            events.append((2, old, old, None, False))
            known.append(True)
        if new and new in passing:
            events.append((1, new, old or new, value, bool(old) and value is None))
            known.append((old or new) in passing)
    return events, known


def applied(history: list[tuple[str, str, str | None]], before: dict[str, str]) -> dict[str, str]:
    table = dict(before)
    for old, new, value in history:
        was = table.pop(old, None) if old else None
        if new:
            table[new] = value if value is not None else str(was)
    return table


@settings(max_examples=200, deadline=None)
@given(moves())
def test_values_of_rows_that_move_in_from_ranges_not_handed_over_are_those_of_the_position(found: Any) -> None:
    history, cut, before = found
    events, known = halves(history[:cut], "abc")
    if not any(e[4] for e in events):
        return
    stored = as_rows({k: v for k, v in before.items() if k in "abc"})
    expected = {k: v for k, v in applied(history[:cut], before).items() if k in "abc"}
    first = Filling(as_events(events, known), None, ("k",))
    try:
        rows = first.filled(stored, ())
    except Missing:
        ahead, _ = halves(history[cut:], "abcxy")
        second = Filling(as_events(events, known), as_events(ahead) if ahead else None, ("k",))
        now = as_rows(applied(history, before))
        try:
            rows = second.filled(stored, [(np.ones(len(second.now), bool), now)])
        except Overtaken:
            return  # its value at the position is nowhere any more
    values = rows.column("v").to_pylist()
    touched = {e[1] for e in events}
    assert final(events, values) == {k: v for k, v in expected.items() if k in touched}


def test_a_value_that_nobody_has_does_not_matter_if_the_row_is_deleted_later() -> None:
    assert fill([(1, "a", "a", None, True), (2, "a", "a", None, False)], {}) == [None, None]


def test_a_value_that_nobody_has_does_not_matter_if_it_is_overwritten_later() -> None:
    assert fill([(1, "a", "a", None, True), (1, "a", "a", "x", False)], {}) == [None, "x"]


def test_values_that_python_has_no_word_for_are_filled_in_as_they_are() -> None:
    infinite = pa.array([[2**31 - 1, None], [-(2**31) + 1], None, []], pa.list_(pa.int32())).cast(pa.list_(pa.date32()))
    events = as_events([(1, k, k, None, True) for k in "dcba"])
    rows = events.rows.set_column(1, "v", pa.nulls(4, infinite.type))
    stored = pa.table({"k": ["a", "b", "c", "d"], "v": infinite})
    filled = Filling(Events(rows, events.before, events.unchanged, events.known), None, ("k",)).filled(stored, ())
    assert filled.column("v").combine_chunks().equals(infinite.take(pa.array([3, 2, 1, 0])))
