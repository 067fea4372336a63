"""Look-ups of many keys by an index give what reading the whole segments gives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, SEQ, Column, Schema
from headwater.spark import segment_index
from headwater.spark.lookup import lookup_rows
from headwater.storage.files import CACHE, DataDir
from headwater.storage.segments import write_segment

VNODES = 16
SCHEMAS = {
    "number": Schema((Column("id", "BIGINT", nullable=False), Column("v", "STRING"), Column("w", "INT")), ("id",)),
    "text": Schema((Column("id", "STRING", nullable=False), Column("v", "STRING"), Column("w", "INT")), ("id",)),
    "both": Schema(
        (Column("id", "BIGINT", nullable=False), Column("v", "STRING", nullable=False), Column("w", "INT")), ("id", "v")
    ),
}


def rows_of(rng: random.Random, schema: Schema, count: int, seq: int) -> pa.Table:
    """Different keys, out of few enough that other segments have them too."""
    ids = rng.sample(range(-200, 200), count)
    values: dict[str, Any] = {
        "id": pa.array([str(i) for i in ids] if schema["id"].type == "STRING" else ids),
        "v": pa.array([rng.choice("ab") if "v" in schema.key else rng.choice(["x", None, "yy" * 20]) for _ in ids]),
        "w": pa.array([rng.choice([None, i]) for i in ids], pa.int32()),
        OP: pa.array([rng.choice([OP_UPSERT, OP_UPSERT, OP_DELETE]) if seq else OP_UPSERT for _ in ids], pa.int8()),
        SEQ: pa.array(np.arange(seq, seq + count) if seq else np.zeros(count, np.int64)),
    }
    return pa.table(values)


def expected(schema: Schema, parts: list[pa.Table], keys: pa.Table) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for part in parts for row in part.to_pylist()):
        key = tuple(row[k] for k in schema.key)
        if key not in newest or newest[key][SEQ] <= row[SEQ]:
            newest[key] = row
    wanted = {tuple(row[k] for k in schema.key) for row in keys.to_pylist()}
    return {key: (row["v"], row["w"]) for key, row in newest.items() if row[OP] == OP_UPSERT and key in wanted}


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("small", [0, 100_000], ids=["kept beside the data", "held in memory"])
@pytest.mark.parametrize("seed", range(6))
def test_rows_found_are_the_newest_of_the_wanted_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, small: int, seed: int
) -> None:
    monkeypatch.setattr(segment_index, "SMALL_ROWS", small)
    rng, schema, data_dir = random.Random(seed), SCHEMAS[kind], DataDir(str(tmp_path))
    counts = [150, rng.randint(1, 60), rng.randint(1, 60)]
    parts = [rows_of(rng, schema, count, seq=i * 1000) for i, count in enumerate(counts)]
    paths = [write_segment(data_dir, 1, schema, part, kind="base", vnode_count=VNODES).path for part in parts]
    for wanted in (rows_of(rng, schema, 120, 1), rows_of(rng, schema, 2, 1)):
        keys = wanted.select(list(schema.key))
        for _ in range(2):  # the second time out of what the first has left
            found = lookup_rows(data_dir, schema, paths, keys, VNODES, ["id", "v", "w"])
            by_key = {tuple(row[k] for k in schema.key): (row["v"], row["w"]) for row in found.to_pylist()}
            assert len(by_key) == found.num_rows
            assert by_key == expected(schema, parts, keys)
    assert (tmp_path / CACHE).exists() == (small == 0)


def test_full_disk_costs_speed_and_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_index, "SMALL_ROWS", 0)
    schema, data_dir = SCHEMAS["number"], DataDir(str(tmp_path))
    part = rows_of(random.Random(1), schema, 200, 0)
    path = write_segment(data_dir, 1, schema, part, kind="base", vnode_count=VNODES).path
    (tmp_path / CACHE).write_text("in the way of every folder")
    found = lookup_rows(data_dir, schema, [path], part.select(["id"]), VNODES, ["id", "w"])
    assert found.num_rows == 200
