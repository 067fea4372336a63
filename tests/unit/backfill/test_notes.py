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
from headwater.runtime.reads import in_turns
from headwater.spark.backfill import ReadInTurn
from headwater.storage.files import DataDir


@dataclass
class FakeRead:
    """A split whose read notes its number; `fails` at the n-th try."""

    number: int
    log: list[int]
    fails: list[bool] = field(default_factory=list)
    sparse: int = 0
    subject: int = 7
    config: Any = None

    @property
    def split(self) -> Any:
        return SimpleNamespace(split_id=self.number)

    def fetch(self, conn: Any, *, dense: bool) -> Any:
        self.log.append(self.number)
        if self.fails and self.fails.pop(0):
            raise TransientError("SOURCE_UNREACHABLE", "gone")
        return SimpleNamespace(rows=pa.table({"a": [1]}), dense=dense and self.number != self.sparse)

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


def test_splits_of_two_readers_are_each_read_once_and_whoever_is_done_helps_the_other(notes: Notes) -> None:
    log: list[int] = []
    first, second = in_turns([FakeRead(n, log) for n in range(1, 9)], 2, notes)
    begun = first.run()
    next(begun)  # 1 is read and noted, 3 read: one result behind
    assert [r["split_id"] for r in second.run()] == [1, 2, 4, 6, 8, 7, 5], "with what was noted before"
    assert log == [1, 3, 2, 4, 6, 8, 7, 5]
    assert [r["split_id"] for r in begun] == [3] and len(log) == 8


def test_task_that_is_tried_again_goes_on_with_what_it_had_begun(notes: Notes) -> None:
    log: list[int] = []
    first, second = in_turns([FakeRead(n, log) for n in range(1, 5)], 2, notes)
    next(first.run())  # and then its worker dies
    assert [r["split_id"] for r in first.run()] == [1, 3, 4, 2] and log == [1, 3, 3, 4, 2]
    assert sorted(r["split_id"] for r in second.run()) == [1, 2, 3, 4] and len(log) == 5


def test_where_splits_cannot_be_claimed_each_reader_has_its_share(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DataDir, "is_local", False)
    log: list[int] = []
    turns = in_turns([FakeRead(n, log) for n in range(1, 6)], 2, notes)
    assert [[r.split.split_id for r in turn.reads] for turn in turns] == [[1, 3, 5], [2, 4]]
    assert sorted({r["split_id"] for turn in turns for r in turn.run()}) == sorted(log) == [1, 2, 3, 4, 5]


def test_there_are_no_more_readers_than_splits(notes: Notes) -> None:
    reads = [FakeRead(n, []) for n in (1, 2)]
    for told in (notes, None):
        assert [turn.reads[0].split.split_id for turn in in_turns(reads, 3, told)] == [1, 2]


def test_a_split_whose_pages_have_too_few_of_its_keys_is_the_last_that_is_tried_so(notes: Notes) -> None:
    tried: list[bool] = []

    class Tried(FakeRead):
        def fetch(self, conn: Any, *, dense: bool) -> Any:
            tried.append(dense)
            return super().fetch(conn, dense=dense)

    in_turn([Tried(n, [], sparse=2) for n in (1, 2, 3, 4)], notes)
    assert tried == [True, True, False, False]


class Large:
    """Rows that a plain object stands for, which can be referred to weakly."""

    nbytes = 1 << 40


@dataclass
class LargeRead(FakeRead):
    """Looks, when it reads, which of the splits before it are still in memory."""

    before: list[weakref.ref[Any]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    def fetch(self, conn: Any, *, dense: bool) -> Any:
        self.held.append(sum(rows() is not None for rows in self.before))
        found = SimpleNamespace(rows=Large(), dense=dense)
        self.before.append(weakref.ref(found.rows))
        return found


def test_rows_of_a_large_split_are_gone_when_the_next_is_read(notes: Notes) -> None:
    before: list[weakref.ref[Any]] = []
    held: list[int] = []
    in_turn([LargeRead(n, [], before=before, held=held) for n in (1, 2, 3)], notes)
    assert held == [0, 0, 0]
