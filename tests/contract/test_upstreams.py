"""A Delta table as an upstream, on real tables: what its tasks write is the table, at every version."""

from __future__ import annotations

import asyncio
import pickle
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.connectors.delta.upstream import FEED, CopyFiles, DeltaUpstream, TakeChanges
from headwater.errors import DefiniteError, UsageError
from headwater.model.schema import OP, OP_UPSERT, Column, keyed
from headwater.runtime.followed import Followed
from headwater.sql.statements import CreateTable
from headwater.storage.checkpoint import NewSegment
from headwater.storage.files import DataDir
from headwater.storage.segments import newest_per_key, read_segments

deltalake = pytest.importorskip("deltalake")
SCHEMA = keyed([Column("id", "BIGINT", False), Column("v", "STRING"), Column("part", "INT")], ["id"])
VNODES = 16


class Lake:
    """A Delta table, and what our tasks make of it."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "lake")
        (folder / "data").mkdir()
        self.data_dir = DataDir(str(folder / "data"))
        self.upstream = DeltaUpstream("orders", self.path, SCHEMA)
        self.segments: list[NewSegment] = []
        self.numbers = 1

    def write(self, rows: dict[int, tuple[str, int]], **more: Any) -> None:
        table = pa.table(
            {
                "id": pa.array(rows, pa.int64()),
                "v": pa.array([v for v, _ in rows.values()]),
                "part": pa.array([p for _, p in rows.values()], pa.int32()),
            }
        )
        deltalake.write_deltalake(self.path, table, **more)

    def start(self, rows: dict[int, tuple[str, int]]) -> None:
        self.write(rows, partition_by=["part"], configuration={FEED: "true"})

    def copy(self) -> int:
        version = self.upstream.latest_epoch()
        for first in range(2):
            task = CopyFiles(self.data_dir, 1, self.upstream, version, first, 2, VNODES)
            self.segments += [NewSegment(**result["segment"]) for result in task.run()]
        return version

    def take(self, after: int, upto: int) -> None:
        first, last = self.upstream.change_log(after, upto)
        task = TakeChanges(self.data_dir, 1, self.upstream, first, last, self.numbers, VNODES)
        found = [NewSegment(**result["segment"]) for result in task.run()]
        self.numbers += sum(s.rows for s in found)
        self.segments += found

    def ours(self) -> dict[int, tuple[str, int]]:
        rows = read_segments(self.data_dir, SCHEMA, [s.path for s in self.segments])
        newest = newest_per_key(rows, SCHEMA.key).to_pylist()
        return {r["id"]: (r["v"], r["part"]) for r in newest if r[OP] == OP_UPSERT}

    def theirs(self) -> dict[int, tuple[str, int]]:
        rows = deltalake.DeltaTable(self.path).to_pyarrow_table().to_pylist()
        return {r["id"]: (r["v"], r["part"]) for r in rows}


@pytest.mark.parametrize("seed", range(3))
def test_copy_and_changes_give_the_delta_table_at_every_version(tmp_path: Path, seed: int) -> None:
    lake, rng = Lake(tmp_path), random.Random(seed)
    lake.start({i: (f"v{i}", i % 3) for i in range(20)})
    at = lake.copy()
    assert lake.ours() == lake.theirs()
    for number in range(6):
        table = deltalake.DeltaTable(lake.path)
        kind = rng.choice(["append", "delete", "update", "key"])
        if kind == "append":
            lake.write({100 * (number + 1) + i: ("new", i % 3) for i in range(3)}, mode="append")
        elif kind == "delete":
            table.delete(f"id % 5 = {rng.randint(0, 4)}")
        elif kind == "update":
            table.update(updates={"v": f"'w{number}'"}, predicate=f"id % 4 = {rng.randint(0, 3)}")
        else:
            table.update(updates={"id": "id + 1000"}, predicate=f"id = {rng.randint(0, 19)}")
        latest = lake.upstream.latest_epoch()
        if latest > at and rng.random() < 0.6:  # a statement that meets no row makes no version
            lake.take(at, latest)
            at = latest
            assert lake.ours() == lake.theirs(), (seed, number)
    lake.take(0, lake.upstream.latest_epoch())  # reading versions twice is harmless
    assert lake.ours() == lake.theirs()


def test_a_range_holds_one_change_per_key(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.start({1: ("a", 0), 2: ("b", 0)})
    lake.copy()
    for value in "xyz":
        deltalake.DeltaTable(lake.path).update(updates={"v": f"'{value}'"}, predicate="id = 1")
    lake.take(0, 3)
    assert lake.segments[-1].rows == 1
    assert lake.ours() == {1: ("z", 0), 2: ("b", 0)}


def test_a_table_without_change_data_feed_is_refused_with_the_statement_that_turns_it_on(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.write({1: ("a", 0)})
    with pytest.raises(DefiniteError) as caught:
        lake.upstream.check()
    assert caught.value.code == "UPSTREAM_UNREADABLE"
    assert FEED in caught.value.hint


def test_a_dropped_table_and_a_vacuumed_log_are_told_apart(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    with pytest.raises(DefiniteError) as caught:
        lake.upstream.latest_epoch()
    assert caught.value.code == "UPSTREAM_DROPPED"
    lake.start({1: ("a", 0)})
    deltalake.DeltaTable(lake.path).update(updates={"v": "'b'"}, predicate="id = 1")
    for change in (Path(lake.path) / "_change_data").rglob("*.parquet"):
        change.unlink()
    with pytest.raises(DefiniteError) as caught:
        lake.take(0, 1)
    assert caught.value.code == "UPSTREAM_EXPIRED"
    assert "create it again" in caught.value.hint


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.start({1: ("a", 0)})
    other = keyed([Column("id", "BIGINT", False), Column("amount", "INT")], ["id"])
    with pytest.raises(DefiniteError, match="no column amount"):
        DeltaUpstream("orders", lake.path, other).check()


def test_secrets_of_a_followed_table_are_references_until_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path)
    lake.start({1: ("a", 1)})
    upstream = DeltaUpstream("orders", lake.path, SCHEMA, {"aws_secret_access_key": "${LAKE_SECRET}"})
    monkeypatch.delenv("LAKE_SECRET", raising=False)
    with pytest.raises(UsageError, match="SECRET_MISSING"):
        upstream.check()
    monkeypatch.setenv("LAKE_SECRET", "hunter2")
    upstream.check()
    assert [r["segment"]["rows"] for r in CopyFiles(lake.data_dir, 1, upstream, 0, 0, 1, VNODES).run()] == [1]
    assert b"hunter2" not in pickle.dumps(upstream) and "hunter2" not in repr(upstream)


@pytest.mark.parametrize(
    "options",
    [
        {"path": "/lake", "storage.aws_secret_access_key": "hunter2"},
        {"path": "/lake", "storage.azure_storage_sas": "hunter2"},
        {"path": "s3://key:hunter2@bucket/orders"},
        {"path": "s3://key:${SECRET}@bucket/orders"},
    ],
)
def test_a_followed_table_takes_no_secret_in_clear(options: dict[str, str]) -> None:
    followed = Followed(core=None)  # type: ignore[arg-type]  # refused before it is asked for anything
    statement = CreateTable("CREATE TABLE …", "orders", SCHEMA.columns, ("id",), {"connector": "delta", **options})
    with pytest.raises(UsageError) as caught:
        asyncio.run(followed.create(statement))
    assert caught.value.code in ("LITERAL_SECRET", "OPTION_VALUE") and "hunter2" not in caught.value.render()
