"""Rows in memory and Spark give a sink the same batch: the same net changes, of the same Arrow types."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, SEQ, Column, Schema, quoted
from headwater.model.types import arrow_type
from headwater.sink.batch import RowBatch, net_rows
from headwater.spark.sink import run_tasks
from headwater.spark.table import TableReader
from headwater.storage.checkpoint import Segment
from headwater.storage.files import DataDir
from headwater.storage.segments import read_held, write_segment

pytestmark = pytest.mark.spark
SCHEMA = Schema(
    (
        Column("id", "BIGINT", nullable=False),
        Column("day", "DATE", nullable=False),
        *(
            Column(f"c{i}", kind)
            for i, kind in enumerate(["STRING", "BINARY", "BOOLEAN", "TINYINT", "SMALLINT", "INT"])
        ),
        *(Column(f"d{i}", kind) for i, kind in enumerate(["FLOAT", "DOUBLE", "DECIMAL(38,9)", "DECIMAL(10,2)"])),
        *(Column(f"t{i}", kind) for i, kind in enumerate(["TIMESTAMP", "TIMESTAMP_NTZ", "ARRAY<STRING>"])),
        Column("s", "STRUCT<a: INT, b: ARRAY<DOUBLE>>"),
    ),
    ("id", "day"),
)


def row(rng: random.Random) -> dict[str, Any]:
    at = dt.datetime(2026, 1, 1) + dt.timedelta(microseconds=rng.randrange(10**12))
    values: dict[str, Any] = {
        "c0": rng.choice(["", "ü\n", "x" * 50]),
        "c1": rng.randbytes(3),
        "c2": rng.random() < 0.5,
        "c3": -1,
        "c4": 7,
        "c5": rng.randrange(1 << 20),
        "d0": 0.5,
        "d1": rng.choice([float("nan"), -0.0, 1e300]),
        "d2": Decimal("12345678901234567890.123456789"),
        "d3": Decimal("-0.01"),
        "t0": at.replace(tzinfo=dt.UTC),
        "t1": at,
        "t2": rng.choice([[], ["a", None], None]),
        "s": {"a": 1, "b": [rng.random(), None]},
    }
    chosen = {name: value if rng.random() < 0.8 else None for name, value in values.items()}
    return {"id": rng.randrange(30), "day": dt.date(2026, 1, 1 + rng.randrange(3)), **chosen}


def table(rows: list[dict[str, Any]], ops: list[int], first_seq: int) -> pa.Table:
    columns = {c.name: pa.array([r[c.name] for r in rows], arrow_type(c.type)) for c in SCHEMA.columns}
    seqs = pa.array(range(first_seq, first_seq + len(rows)), pa.int64())
    return pa.table({**columns, OP: pa.array(ops, pa.int8()), SEQ: seqs})


def seen(batch: Any) -> tuple[list[str], list[str]]:
    """What the tasks of a sink see: the types, and the rows as texts."""

    def task(batches: Iterator[Any], info: Any) -> dict[str, Any]:
        rows, types = [], []
        for one in batches:
            types = [f"{f.name} {f.type}" for f in one.schema]
            rows += [repr(list(r.values())) for r in one.to_pylist()]
        return {"rows": rows, "types": types}

    results = run_tasks(batch, task)
    return next(r["types"] for r in results if r["types"]), sorted(line for r in results for line in r["rows"])


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_in_memory_and_spark_give_the_same_batch(seed: int, spark: Any, tmp_path: Path) -> None:
    rng = random.Random(seed)
    data_dir, segments, seq = DataDir(str(tmp_path)), [], 0
    for epoch in range(1, 5):
        rows = [row(rng) for _ in range(40)]
        ops = [rng.choice([OP_UPSERT, OP_UPSERT, OP_DELETE]) for _ in rows]
        new = write_segment(data_dir, 1, SCHEMA, table(rows, ops, seq), kind="delta", vnode_count=8)
        segments.append(Segment(epoch, 1, new.path, "delta", True, new.rows, new.bytes, epoch, 1 << 62))
        seq += len(rows)
    handed_over = {(r["id"], r["day"]): r for r in (row(rng) for _ in range(40))}
    base = table(list(handed_over.values()), [OP_UPSERT] * len(handed_over), 0)
    new = write_segment(data_dir, 1, SCHEMA, base, kind="base", vnode_count=8)
    segments.append(Segment(5, 1, new.path, "base", True, new.rows, new.bytes, 5, 1 << 62))
    held = [read_held(data_dir, SCHEMA, [s], 1 << 24) for s in segments]
    names = [*SCHEMA.names, OP]
    here = seen(RowBatch(net_rows([h for h in held if h is not None], SCHEMA.key).select(names)))
    by_spark = TableReader(spark, data_dir, SCHEMA, 8).changes(segments).select(*map(quoted, names))
    assert here == seen(by_spark)
