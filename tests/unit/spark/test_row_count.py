"""The rows that a table holds, counted over keys alone, against a plain count of what base and deltas amount to."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, SEQ, Column, Schema
from headwater.spark.row_count import CountVnodes
from headwater.storage.checkpoint import NewSegment
from headwater.storage.files import DataDir
from headwater.storage.segments import write_segment

VNODES = 16
SCHEMA = Schema((Column("a", "INT"), Column("b", "STRING"), Column("v", "BIGINT")), ("a", "b"))


def write(data_dir: DataDir, kind: str, rows: list[tuple[int, str, int, int]]) -> NewSegment:
    a, b, op, seq = zip(*rows, strict=True)
    columns: dict[str, Any] = {"a": pa.array(a, pa.int32()), "b": b, "v": pa.array(seq, pa.int64())}
    table = pa.table({**columns, OP: pa.array(op, pa.int8()), SEQ: pa.array(seq, pa.int64())})
    return write_segment(data_dir, 1, SCHEMA, table, kind=kind, vnode_count=VNODES)


def counted(data_dir: DataDir, segments: list[NewSegment], parts: int) -> int:
    base = tuple(s.path for s in segments if s.kind == "base")
    deltas = tuple(s.path for s in segments if s.kind == "delta")
    bounds = [VNODES * i // parts for i in range(parts + 1)]
    tasks = [
        CountVnodes(data_dir, 1, SCHEMA, base, deltas, first, end, VNODES) for first, end in itertools.pairwise(bounds)
    ]
    return sum(s.rows for s in segments if s.kind == "base") + sum(r["more"] for t in tasks for r in t.run())


@pytest.mark.parametrize("seed", range(6))
def test_the_count_is_that_of_the_rows_whatever_was_changed(tmp_path: Path, seed: int) -> None:
    draw, data_dir = random.Random(seed), DataDir(str(tmp_path))
    keys = [(draw.randrange(8), draw.choice("abc")) for _ in range(60)]
    held = set(draw.sample(sorted(set(keys)), 10)) if seed else set()
    segments = [write(data_dir, "base", [(a, b, OP_UPSERT, 0) for a, b in held])] if held else []
    seq = 0
    for _ in range(4):
        rows = []
        for a, b in draw.choices(keys, k=9):
            seq += 1
            op = draw.choice((OP_UPSERT, OP_DELETE))
            rows.append((a, b, op, seq))
            (held.add if op == OP_UPSERT else held.discard)((a, b))
        segments.append(write(data_dir, "delta", rows))
        assert counted(data_dir, segments, 1) == counted(data_dir, segments, 3) == len(held)
