"""What a long job has read is known before it ends, survives its failure, and is not read again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from headwater.backfill.cdc.notes import Notes
from headwater.errors import TransientError
from headwater.spark.backfill import ReadInTurn
from headwater.storage.files import DataDir


@dataclass
class FakeRead:
    """A split whose read notes its number; `fails` at the n-th try."""

    number: int
    log: list[int]
    fails: list[bool] = field(default_factory=list)
    subject: int = 7
    config: Any = None

    @property
    def split(self) -> Any:
        return SimpleNamespace(split_id=self.number)

    def fetch(self, conn: Any) -> Any:
        self.log.append(self.number)
        if self.fails and self.fails.pop(0):
            raise TransientError("SOURCE_UNREACHABLE", "gone")
        return SimpleNamespace(rows=pa.table({"a": [1]}))

    def stage(self, found: Any, packed: dict[str, Any]) -> dict[str, Any]:
        return {"split_id": self.number, "segment": {"path": f"{self.number}-{len(self.log)}"}}


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def connect(*_: Any, **__: Any) -> Iterator[None]:
        yield None

    monkeypatch.setattr("headwater.connectors.postgres.client.connect", connect)


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes.fresh(DataDir(str(tmp_path)))


def in_turn(reads: list[FakeRead], notes: Notes, **more: float) -> list[dict[str, Any]]:
    return list(ReadInTurn(tuple(reads), notes, **more).run())  # type: ignore[arg-type]


def test_every_split_is_noted_when_it_is_staged(notes: Notes) -> None:
    log: list[int] = []
    results = in_turn([FakeRead(n, log) for n in (1, 2, 3)], notes)
    assert {r["split_id"]: r for r in results} == notes.read() and log == [1, 2, 3]


def test_splits_before_an_error_are_noted_and_not_read_again(notes: Notes) -> None:
    log: list[int] = []
    reads = [FakeRead(1, log), FakeRead(2, log), FakeRead(3, log, [True, False])]
    assert in_turn(reads, notes)[-1]["error"]["code"] == "SOURCE_UNREACHABLE"
    assert sorted(notes.read()) == [1, 2]
    assert sorted(r["split_id"] for r in in_turn(reads, notes)) == [1, 2, 3]
    assert log == [1, 2, 3, 3]


def test_no_split_is_begun_after_the_time_is_over_but_the_first(notes: Notes) -> None:
    log: list[int] = []
    assert [r["split_id"] for r in in_turn([FakeRead(n, log) for n in (1, 2)], notes, for_s=-1.0)] == [1]
    assert log == [1]


def test_note_that_is_being_written_is_left_for_later(notes: Notes) -> None:
    notes.write(1, {"split_id": 1})
    fs, path = notes.data_dir.path(f"{notes.folder}/2-x.json")
    with fs.open_output_stream(path) as out:
        out.write(b'{"split_id": 2, "seg')
    assert list(notes.read()) == [1]
    notes.delete()
    assert notes.read() == {}


class Large:
    """Rows that a plain object stands for, which can be referred to weakly."""

    nbytes = 1 << 40


@dataclass
class LargeRead(FakeRead):
    """Looks, when it reads, which of the splits before it are still in memory."""

    before: list[weakref.ref[Any]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    def fetch(self, conn: Any) -> Any:
        self.held.append(sum(rows() is not None for rows in self.before))
        found = SimpleNamespace(rows=Large())
        self.before.append(weakref.ref(found.rows))
        return found


def test_rows_of_a_large_split_are_gone_when_the_next_is_read(notes: Notes) -> None:
    before: list[weakref.ref[Any]] = []
    held: list[int] = []
    in_turn([LargeRead(n, [], before=before, held=held) for n in (1, 2, 3)], notes)
    assert held == [0, 0, 0]
