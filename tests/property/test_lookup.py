"""Look-ups of many keys by an index give what reading the whole segments gives."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, SEQ, Column, Schema
from headwater.spark import fetch, segment_index
from headwater.spark.lookup import lookup_rows
from headwater.storage.files import CACHE, DataDir
from headwater.storage.segments import arrow_schema, write_segment

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


def snapshot(schema: Schema, parts: list[pa.Table]) -> list[dict[str, Any]]:
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for part in parts for row in part.to_pylist()):
        key = tuple(row[k] for k in schema.key)
        if key not in newest or newest[key][SEQ] <= row[SEQ]:
            newest[key] = row
    return [row for row in newest.values() if row[OP] == OP_UPSERT]


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("small", [0, 100_000], ids=["kept beside the data", "held in memory"])
@pytest.mark.parametrize("match", [("w",), ("v",), ("w", "v"), ("id",), ("v", "id")], ids="+".join)
def test_rows_fetched_by_values_are_those_of_the_snapshot_that_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, small: int, match: tuple[str, ...]
) -> None:
    monkeypatch.setattr(segment_index, "SMALL_ROWS", small)
    rng, schema, data_dir = random.Random(repr((kind, match))), SCHEMAS[kind], DataDir(str(tmp_path))
    parts = [rows_of(rng, schema, count, seq=i * 1000) for i, count in enumerate((150, 40, 40))]
    kinds = ["base", "delta", "delta"]
    paths = [
        write_segment(data_dir, 1, schema, part, kind=kind, vnode_count=VNODES).path
        for part, kind in zip(parts, kinds, strict=True)
    ]
    this = fetch.Run.empty()
    this.add("1/t", "after", fetch.Files(tuple(paths[:1]), tuple(paths[1:])))
    monkeypatch.setattr(fetch, "_run", lambda: json.loads(this.text()))
    place = fetch.Place("1/t", 1, data_dir, schema, VNODES)
    for values in (rows_of(rng, schema, 60, 1), rows_of(rng, schema, 1, 1)):
        wanted = {tuple(row[c] for c in match) for row in values.to_pylist()}
        rows = [row for row in snapshot(schema, parts) if tuple(row[c] for c in match) in wanted]
        expected = sorted(repr((row["w"], row["id"], row["v"])) for row in rows)
        given = values.select(list(match)).rename_columns([f"v{i}" for i in range(len(match))])
        batches = fetch.FetchRows(place, "after", ("w", "id", "v"), match)([*given.to_batches(), *given.to_batches()])
        found = [row for batch in batches for row in batch.to_pylist()]
        assert sorted(repr(tuple(row.values())) for row in found) == expected
    assert list(fetch.FetchRows(place, "after", ("w",), match)([])) == []
    everything = list(fetch.ReadRows(place, "after", ("id", "w"))(parts[0].to_batches()[:1]))
    assert sum(batch.num_rows for batch in everything) == len(snapshot(schema, parts))


UTC = ZoneInfo("UTC")  # as Arrow gives it back
# Of each type few values, so that rows come to have one, lose it and have it again; NULL is hashed as 0 or '' is.
WORDS: dict[str, list[Any]] = {
    "i": [None, 0, 1, -1],
    "s": [None, "", "0", "N", "1:a", "ä"],
    "d": [None, Decimal("0.00"), Decimal("1.50"), Decimal("-1.50")],
    "b": [None, True, False],
    "day": [None, date(1970, 1, 1), date(1969, 12, 31)],
    "ts": [None, datetime(1970, 1, 1, tzinfo=UTC), datetime(1890, 1, 1, 0, 0, 0, 1, tzinfo=UTC)],
    "x": [None, b"", b"\x00", b"0"],
}
TYPES = dict(zip(WORDS, ["INT", "STRING", "DECIMAL(8,2)", "BOOLEAN", "DATE", "TIMESTAMP", "BINARY"], strict=True))
MANY_KEYS = {
    "one": [Column("id", "INT", nullable=False)],
    "two": [Column("id", "INT", nullable=False), Column("t", "STRING", nullable=False)],
}
Stored = dict[tuple[Any, ...], dict[str, Any]]


class ManyDeltas:
    """A table under changes whose every epoch is a delta, with the rows that it has by now in a dictionary."""

    def __init__(self, folder: Path, key: list[Column], rng: random.Random) -> None:
        self.schema = Schema((*key, *(Column(n, t) for n, t in TYPES.items())), tuple(c.name for c in key))
        self.data_dir, self.rng = DataDir(str(folder)), rng
        self.rows: Stored = {}
        self.seq = 0
        self.base: list[str] = []
        self.delta: list[str] = []

    def _key(self) -> tuple[Any, ...]:
        number = self.rng.randrange(-8, 8)
        return (number, self.rng.choice(["", "0"]))[: len(self.schema.key)]

    def change(self, changes: int, *, only_new: bool = False) -> None:
        """One segment: upserts of new keys, known ones and such as had been deleted, and deletes."""
        written: list[dict[str, Any]] = []
        for _ in range(changes):
            key = self._key()
            named = dict(zip(self.schema.key, key, strict=True))
            if only_new and key in self.rows:
                continue
            if not only_new and self.rng.random() < 0.35:
                self.rows.pop(key, None)
                written.append({**named, OP: OP_DELETE})
            else:
                self.rows[key] = named | {name: self.rng.choice(values) for name, values in WORDS.items()}
                written.append({**self.rows[key], OP: OP_UPSERT})
        self._write(written, "base" if only_new else "delta")

    def fold(self) -> None:
        self.base, self.delta = [], []
        self._write([{**row, OP: OP_UPSERT} for row in self.rows.values()], "base")

    def _write(self, rows: list[dict[str, Any]], kind: str) -> None:
        names = [*self.schema.names, OP]
        fields = [arrow_schema(self.schema).field(name) for name in names]
        table = pa.table({f.name: pa.array([row.get(f.name) for row in rows], f.type) for f in fields})
        first = 0 if kind == "base" else self.seq
        numbers = np.arange(first, first + len(rows)) if kind == "delta" else np.zeros(len(rows), np.int64)
        self.seq += len(rows)
        table = table.append_column(SEQ, pa.array(numbers))
        segment = write_segment(self.data_dir, 1, self.schema, table, kind=kind, vnode_count=VNODES)
        (self.base if kind == "base" else self.delta).append(segment.path)

    def with_values(self, match: tuple[str, ...], wanted: set[tuple[Any, ...]]) -> list[str]:
        """The plain twin of FetchRows."""
        found = [row for row in self.rows.values() if tuple(row[name] for name in match) in wanted]
        return sorted(repr([row[name] for name in self.schema.names]) for row in found)

    def fetched(self, match: tuple[str, ...], wanted: set[tuple[Any, ...]]) -> list[str]:
        types = [arrow_schema(self.schema).field(name).type for name in match]
        columns = [pa.array([values[i] for values in sorted(wanted, key=repr)], t) for i, t in enumerate(types)]
        given = pa.table(columns, names=[f"v{i}" for i in range(len(match))])
        place = fetch.Place("1/t", 1, self.data_dir, self.schema, VNODES)
        batches = fetch.FetchRows(place, "after", tuple(self.schema.names), match)(given.to_batches())
        return sorted(repr([row[n] for n in self.schema.names]) for batch in batches for row in batch.to_pylist())


@pytest.fixture(params=["kept beside the data", "held in memory", "too large for an index"])
def _places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(segment_index, "SMALL_ROWS", 100_000 if request.param == "held in memory" else 0)
    if request.param == "too large for an index":
        monkeypatch.setattr(segment_index, "MAX_COLUMN_BYTES", 0)
    segment_index._open.clear()
    yield
    segment_index._open.clear()


@pytest.mark.usefixtures("_places")
@pytest.mark.parametrize("kind", MANY_KEYS)
@pytest.mark.parametrize("seed", range(2))
def test_rows_fetched_out_of_many_deltas_are_those_that_have_the_values_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    rng = random.Random(seed)
    table = ManyDeltas(tmp_path, MANY_KEYS[kind], rng)
    table.change(20, only_new=True)
    for epoch in range(1, 31):
        table.change(rng.randint(1, 5))
        if epoch == 24:
            table.fold()
        if epoch % 10:
            continue
        this = fetch.Run.empty()
        this.add("1/t", "after", fetch.Files(tuple(table.base), tuple(table.delta)))
        monkeypatch.setattr(fetch, "_run", lambda this=this: json.loads(this.text()))
        for _ in range(8):
            match = tuple(rng.sample([*WORDS, *table.schema.key], rng.randint(1, 3)))
            words = {**WORDS, "id": list(range(-9, 9)), "t": ["", "0"]}
            wanted = {tuple(rng.choice(words[name]) for name in match) for _ in range(rng.randint(1, 6))}
            assert table.fetched(match, wanted) == table.with_values(match, wanted), (match, wanted)


def test_full_disk_costs_speed_and_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_index, "SMALL_ROWS", 0)
    schema, data_dir = SCHEMAS["number"], DataDir(str(tmp_path))
    part = rows_of(random.Random(1), schema, 200, 0)
    path = write_segment(data_dir, 1, schema, part, kind="base", vnode_count=VNODES).path
    (tmp_path / CACHE).write_text("in the way of every folder")
    found = lookup_rows(data_dir, schema, [path], part.select(["id"]), VNODES, ["id", "w"])
    assert found.num_rows == 200
