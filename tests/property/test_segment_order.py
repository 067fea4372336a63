"""Rows go to the places of a segment's order, by vnode and then by key; the plain twin sorts Python tuples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.model.schema import OP, SEQ, VNODE, Column, Schema
from headwater.model.vnode import vnodes
from headwater.storage.files import DataDir
from headwater.storage.segments import places_of, write_segment

VNODES = 4
KEYS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "BIGINT": (pa.int64(), st.integers(-9, 9)),
    "STRING": (pa.string(), st.text("aäB", max_size=2)),
    "BINARY": (pa.binary(), st.binary(max_size=2)),
    "BOOLEAN": (pa.bool_(), st.booleans()),
    "DOUBLE": (pa.float64(), st.integers(-9, 9).map(float)),
}


@st.composite
def keyed(draw: st.DrawFn) -> tuple[Schema, pa.Table]:
    """Unique keys of one to three columns, in any order, in order, or in order but for their end."""
    types = draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=3))
    keys = draw(st.lists(st.tuples(*(KEYS[t][1] for t in types)), max_size=30, unique=True))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(keys)))
        keys = [*sorted(keys[:at], key=as_bytes), *keys[at:]]
    names = [f"k{i}" for i in range(len(types))]
    columns = {n: pa.array([k[i] for k in keys], KEYS[t][0]) for i, (n, t) in enumerate(zip(names, types, strict=True))}
    columns["v"] = pa.array(range(len(keys)), pa.int64())
    schema = Schema((*(Column(n, t) for n, t in zip(names, types, strict=True)), Column("v", "BIGINT")), tuple(names))
    return schema, pa.table(columns)


def as_bytes(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part.encode() if isinstance(part, str) else part for part in key)


def twin(schema: Schema, rows: pa.Table) -> list[int]:
    """`v` of the rows in order."""
    keys = zip(*(rows.column(k).to_pylist() for k in schema.key), strict=True)
    found = vnodes(rows, schema.key, VNODES).to_pylist()
    return [v for _, _, v in sorted((n, as_bytes(k), v) for v, (n, k) in enumerate(zip(found, keys, strict=True)))]


@settings(max_examples=300, deadline=None)
@given(keyed())
def test_places_are_those_of_rows_sorted_by_vnode_and_key(case: tuple[Schema, pa.Table]) -> None:
    schema, rows = case
    found, places = places_of(rows.select(list(schema.key)), schema, VNODES)
    ordered = np.empty(rows.num_rows, np.int64)
    ordered[places] = rows.column("v").to_numpy()
    assert ordered.tolist() == twin(schema, rows)
    assert found.to_pylist() == sorted(vnodes(rows, schema.key, VNODES).to_pylist())


@st.composite
def nearly_in_order(draw: st.DrawFn) -> tuple[Schema, pa.Table]:
    """Keys in order, some hundreds, of which a few stand elsewhere."""
    kinds = {
        "BIGINT": lambda n: pa.array(n, pa.int64()),
        "DATE": lambda n: pa.array(n, pa.int32()).view(pa.date32()),
        "TIMESTAMP": lambda n: pa.array(n, pa.int64()).view(pa.timestamp("us", "UTC")),
        "STRING": lambda n: pa.array([f"{x + 1000:05}" for x in n]),
    }
    types = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=2))
    numbers = list(range(-150, draw(st.integers(-100, 150))))
    if types[0] == "TIMESTAMP":  # the ends of the type, which stand for infinity
        numbers = [-(1 << 63), *numbers, (1 << 63) - 1] if len(types) == 1 else numbers
    for at, to in draw(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=5)):
        numbers.insert(to % len(numbers), numbers.pop(at % len(numbers)))
    parts = [numbers] if len(types) == 1 else [[n // 7 for n in numbers], [n % 7 for n in numbers]]
    names = [f"k{i}" for i in range(len(types))]
    columns = {n: kinds[t](part) for n, t, part in zip(names, types, parts, strict=True)}
    columns["v"] = pa.array(range(len(numbers)), pa.int64())
    schema = Schema((*(Column(n, t) for n, t in zip(names, types, strict=True)), Column("v", "BIGINT")), tuple(names))
    return schema, pa.table(columns)


@settings(max_examples=200, deadline=None)
@given(nearly_in_order())
def test_rows_that_are_nearly_in_order_go_to_the_places_of_all_sorted(case: tuple[Schema, pa.Table]) -> None:
    schema, rows = case
    found, places = places_of(rows.select(list(schema.key)), schema, VNODES)
    by_all = pc.sort_indices(
        rows.append_column(VNODE, vnodes(rows, schema.key, VNODES)),
        sort_keys=[(n, "ascending") for n in (VNODE, *schema.key)],
    )
    ordered = np.empty(rows.num_rows, np.int64)
    ordered[places] = np.arange(rows.num_rows)
    assert ordered.tolist() == by_all.to_pylist()
    assert found.to_pylist() == sorted(vnodes(rows, schema.key, VNODES).to_pylist())


def test_rows_in_any_order_with_or_without_their_kind_make_the_same_segment(tmp_path: Path) -> None:
    schema = Schema((Column("k0", "BIGINT"), Column("v", "BIGINT")), ("k0",))
    rows = pa.table({"k0": [5, 3, 9, 1], "v": [0, 1, 2, 3]})
    full = rows.append_column(OP, pa.array([1] * 4, pa.int8())).append_column(SEQ, pa.array([0] * 4))
    data_dir = DataDir(str(tmp_path))
    contents = []
    for given_rows in (
        rows,
        full,
        full.take(pa.array([3, 0, 2, 1])),
        pa.concat_tables([rows.slice(2), rows.slice(0, 2)]),
    ):
        segment = write_segment(data_dir, 1, schema, given_rows, kind="base", vnode_count=VNODES)
        contents.append(pq.read_table(tmp_path / segment.path, partitioning=None))
    assert contents[0].column("v").to_pylist() == twin(schema, rows)
    assert contents[0].column(VNODE).to_pylist() == sorted(vnodes(rows, schema.key, VNODES).to_pylist())
    assert all(c.equals(contents[0]) for c in contents)
