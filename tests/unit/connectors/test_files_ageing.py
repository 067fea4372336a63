"""A files sink that has run for a long time costs what it cost on its first day, and goes on where an older one was."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.connectors.files import manifest
from headwater.connectors.files.manifest import ManifestLog, Record
from headwater.connectors.files.sink import FilesSink, read_table
from headwater.model.schema import OP, Column
from headwater.sink.batch import RowBatch
from headwater.sink.delivery import DeliveryLoop
from headwater.sink.registry import open_sink

COLUMNS = (Column("id", "BIGINT", nullable=False), Column("v", "STRING"))
OLD = 100_000  # batches


def opened(path: Path, generation: int = 1) -> Any:
    return open_sink("s", {"connector": "files", "path": str(path)}, COLUMNS, ("id",), generation, str)


def started(path: Path, generation: int = 1) -> DeliveryLoop:
    sink = opened(path, generation)
    sink.validate(COLUMNS, ("id",))
    loop = DeliveryLoop(sink)
    loop.start(None)
    return loop


def batch(*rows: tuple[int, str | None, int]) -> RowBatch:
    ids, values, ops = zip(*rows, strict=True) if rows else ((), (), ())
    return RowBatch(
        pa.table({"id": pa.array(ids, pa.int64()), "v": pa.array(values, pa.string()), OP: pa.array(ops, pa.int8())})
    )


def record_of(number: int) -> Record:
    file = {"path": f"data/s-{number}-1-a{number}/part-00000-0.parquet", "rows": 1, "bytes": 1}
    return Record("batch", "s", 1, number - 1, number, "upsert", ("id",), (file,))


def made(path: Path, count: int) -> None:
    """The manifest of that many batches as an older release left it, made directly."""
    folder = path / manifest.MANIFEST_DIR
    folder.mkdir(parents=True)
    (path / manifest.DATA_DIR).mkdir()
    for number in range(count):
        (folder / f"{number:020d}.json").write_text(json.dumps(asdict(record_of(number + 1))))


def aged(path: Path, count: int) -> None:
    """The manifest of that many batches as this release leaves it. Only the last record is ever read: the others are
    names of few files.
    """
    made(path, 0)
    folder = path / manifest.MANIFEST_DIR
    for number in range(count - 1):
        name = folder / f"{number:020d}.json"
        if number % 10_000 == 0:
            some = name
            some.write_text(json.dumps(asdict(record_of(number + 1))))
        else:
            os.link(some, name)
    (folder / f"{count - 1:020d}.json").write_text(json.dumps(asdict(record_of(count))))
    manifest.Staging(path, "s").sweep(ManifestLog(path), 1)
    last = (path / manifest.MANIFEST_DIR / f"{count - 1:020d}.json").read_bytes()
    state = {"epoch": count, "generation": 1, "type": "upsert", "key": ["id"]}
    summary = {"version": 1, "next": count, "last": hashlib.sha256(last).hexdigest(), "sinks": {"s": state}}
    (path / manifest.MANIFEST_DIR / manifest.SUMMARY).write_text(json.dumps(summary))


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Counted:
    """How many files are opened and how many folders listed, whoever does it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.operations = 0
        for owner, name in ((Path, "open"), (Path, "iterdir"), (Path, "read_bytes"), (os, "listdir"), (os, "scandir")):
            monkeypatch.setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, call: Any) -> Any:
        def counted(*args: Any, **more: Any) -> Any:
            self.operations += 1
            return call(*args, **more)

        return counted

    def taken(self) -> int:
        count, self.operations = self.operations, 0
        return count


def one_batch(loop: DeliveryLoop, number: int) -> None:
    loop.deliver(number - 1, number, lambda: batch((number % 10, "x", 1)))


def test_a_batch_after_a_hundred_thousand_costs_what_the_first_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old"
    aged(old, OLD)
    counted = Counted(monkeypatch)
    young_loop = started(tmp_path / "young")
    counted.taken()
    old_loop = started(old, 2)
    assert counted.taken() < 20, "an engine that starts reads what came after the summary"
    for loop, first in ((young_loop, 1), (old_loop, OLD + 1)):
        one_batch(loop, first)  # the folder's first listing is behind it
    counted.taken()
    one_batch(young_loop, 2)
    one_young = counted.taken()
    one_batch(old_loop, OLD + 2)
    assert counted.taken() == one_young
    young = min(seconds(lambda n=n: one_batch(young_loop, n)) for n in range(3, 53))  # type: ignore[misc]
    older = min(seconds(lambda n=n: one_batch(old_loop, OLD + n)) for n in range(3, 53))  # type: ignore[misc]
    assert older < 5 * young + 0.005
    assert old_loop.sink.last_committed() == OLD + 52


def test_a_target_of_an_older_release_goes_on_exactly_and_is_swept_once(tmp_path: Path) -> None:
    made(tmp_path, 250)
    kept, left = (tmp_path / "data" / name for name in ("s-250-1-a250", "s-251-1-dead"))
    foreign = tmp_path / "data" / "other-251-1-x"
    for folder in (kept, left, foreign):
        folder.mkdir()
    loop = started(tmp_path, 2)
    assert loop.sink.last_committed() == 250
    one_batch(loop, 251)
    assert kept.exists() and foreign.exists() and not left.exists()
    again = opened(tmp_path, 3)
    assert again.last_committed() == 251
    assert [r.to_epoch for r in ManifestLog(tmp_path).records(250) if r.kind == "batch"] == [251]


def test_the_summary_is_written_now_and_then_and_believed_only_if_it_is_of_this_log(tmp_path: Path) -> None:
    loop = started(tmp_path)
    for number in range(1, manifest.SUMMARY_EVERY + 5):
        one_batch(loop, number)
    last = manifest.SUMMARY_EVERY + 4
    summary = tmp_path / manifest.MANIFEST_DIR / manifest.SUMMARY
    told = json.loads(summary.read_text())
    assert told["next"] >= manifest.SUMMARY_EVERY and opened(tmp_path).last_committed() == last
    for wrong in ({**told, "last": "0" * 64}, {**told, "next": 10_000}, {**told, "version": 2}, {"next": 1}, []):
        summary.write_text(json.dumps(wrong))
        assert opened(tmp_path).last_committed() == last
    summary.write_text("{")
    assert opened(tmp_path).last_committed() == last
    assert read_table(tmp_path).num_rows == 10


def staged(sink: FilesSink, number: int) -> Any:
    return sink.write(sink.prepare(number - 1, number), batch((1, f"value {number}", 1)))


def folders(path: Path) -> list[str]:
    return sorted(p.name for p in (path / "data").iterdir())


def test_what_a_dead_engine_staged_is_removed_and_what_it_committed_is_not(tmp_path: Path) -> None:
    first = started(tmp_path).sink
    committed = staged(first, 1)
    first._log.append(Record("batch", "s", 1, 0, 1, "upsert", ("id",), tuple(committed.payload["files"])))  # and dies
    second = started(tmp_path, 2).sink
    staged(second, 2)  # and dies
    assert len(folders(tmp_path)) == 2
    third = started(tmp_path, 3)
    one_batch(third, 2)
    assert len(folders(tmp_path)) == 2
    assert read_table(tmp_path).to_pylist() == [{"id": 1, "v": "value 1"}, {"id": 2, "v": "x"}]
    notes = tmp_path / manifest.STAGING_DIR
    assert [f for f in notes.rglob("*") if f.is_file()] == []


def test_what_a_newer_engine_stages_is_not_swept_by_an_older_one(tmp_path: Path) -> None:
    old = started(tmp_path).sink
    new = opened(tmp_path, 2)
    token = staged(new, 1)
    old._staging.sweep(old._log, old.generation)
    assert folders(tmp_path) == [Path(token.payload["directory"]).name]


def test_a_record_that_landed_although_its_link_was_reported_as_taken_keeps_its_files(tmp_path: Path) -> None:
    """A network file system repeats a request whose answer was lost."""
    sink = started(tmp_path).sink
    token = staged(sink, 1)
    append = sink._log.append

    def lost(record: Record) -> bool:
        append(record)
        return False

    sink._log.append = lost  # type: ignore[method-assign]
    sink.commit(token)
    assert read_table(tmp_path).to_pylist() == [{"id": 1, "v": "value 1"}]


def test_an_empty_batch_leaves_no_folder(tmp_path: Path) -> None:
    loop = started(tmp_path)
    loop.deliver(0, 1, lambda: batch())
    assert folders(tmp_path) == [] and loop.sink.last_committed() == 1
