"""The net change of rows in memory is what a plain dictionary says, whatever epochs and segments they came in."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, SEQ, Column, Schema
from headwater.sink.batch import net_rows
from headwater.storage.checkpoint import Segment
from headwater.storage.files import DataDir
from headwater.storage.segments import read_held, write_segment

SCHEMA = Schema((Column("id", "BIGINT", nullable=False), Column("name", "STRING")), ("id",))
Change = tuple[int, int, str | None]  # op, id, name

changes = st.lists(
    st.tuples(st.sampled_from([OP_UPSERT, OP_DELETE]), st.integers(0, 8), st.one_of(st.none(), st.text(max_size=3))),
    max_size=12,
)
Epochs = list[tuple[dict[int, str], list[list[Change]]]]


def once(history: Epochs) -> Epochs:
    """A key is handed over once."""
    seen: set[int] = set()
    for handed_over, _ in history:
        for key in seen & handed_over.keys():
            del handed_over[key]
        seen |= handed_over.keys()
    return history


# An epoch: rows that were handed over, and changes in up to two segments.
epochs = st.lists(
    st.tuples(st.dictionaries(st.integers(0, 8), st.text(max_size=3), max_size=4), st.lists(changes, max_size=2)),
    min_size=1,
    max_size=4,
).map(once)


def plain(history: Epochs) -> dict[int, tuple[int, str | None]]:
    """A handed-over row counts unless there is a change of its key; of the changes the last one does."""
    net: dict[int, tuple[int, str | None]] = {}
    for handed_over, _ in history:
        net |= {key: (OP_UPSERT, name) for key, name in handed_over.items()}
    for _, segments in history:
        for segment in segments:
            for op, key, name in segment:
                net[key] = (op, name)
    return net


def table(rows: Sequence[Change], first_seq: int) -> pa.Table:
    return pa.table(
        {
            "id": pa.array([r[1] for r in rows], pa.int64()),
            "name": pa.array([r[2] for r in rows], pa.string()),
            OP: pa.array([r[0] for r in rows], pa.int8()),
            SEQ: pa.array(range(first_seq, first_seq + len(rows)), pa.int64()),
        }
    )


def written(data_dir: DataDir, rows: pa.Table, kind: str, epoch: int) -> Segment:
    new = write_segment(data_dir, 1, SCHEMA, rows, kind=kind, vnode_count=8)
    return Segment(epoch, 1, new.path, kind, True, new.rows, new.bytes, epoch, 1 << 62)


@settings(deadline=None, max_examples=60)
@given(epochs)
def test_rows_in_memory_amount_to_the_last_change_per_key(history: Epochs) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data_dir = DataDir(folder)
        held, seq = [], 100
        for epoch, (handed_over, segments) in enumerate(history, start=1):
            # Whatever numbers the rows of a base have: they are older than every change.
            base = table([(OP_UPSERT, k, n) for k, n in handed_over.items()], 10_000)
            found = [written(data_dir, base, "base", epoch)] if handed_over else []
            for segment in segments:
                found.append(written(data_dir, table(segment, seq), "delta", epoch))
                seq += len(segment)
            rows = read_held(data_dir, SCHEMA, found, 1 << 20)
            assert rows is not None
            held.append(rows)
        net = net_rows(held, SCHEMA.key)
    got = {r["id"]: (r[OP], r["name"]) for r in net.to_pylist()}
    assert len(got) == net.num_rows
    assert got == plain(history)


def test_rows_that_are_larger_than_their_file_says_are_left_to_spark() -> None:
    rows = table([(OP_UPSERT, i, "x" * 10_000) for i in range(2_000)], 0)
    with tempfile.TemporaryDirectory() as folder:
        segment = written(DataDir(folder), rows, "delta", 1)
        assert segment.bytes < 100_000
        assert read_held(DataDir(folder), SCHEMA, [segment], 1 << 20) is None
