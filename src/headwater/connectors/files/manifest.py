"""The manifest log of a files sink: which data files count, in order, and how far the sink has come.

    <path>/_manifest/00000000000000000007.json     one record per file, numbered without gaps
    <path>/data/<sink>-<to_epoch>-<generation>-<attempt>/part-….parquet

    <path>/_manifest/summary                       what the records up to a number say; made again if it is lost
    <path>/_staging/<sink's digest>/<attempt>      an attempt that is under way, see `Staging`

    {"version": 1, "kind": "claim" | "batch" | "reset", "sink": …, "generation": g, "from_epoch": a, "to_epoch": b,
     "type": "upsert" | "append-only", "key": […], "files": [{"path": relative, "rows": n, "bytes": m}, …]}

A record is written to a temporary name, synced, and then linked to its number: `link` fails if the number is taken,
so each number is written once, complete or not at all. That one rule gives all three promises: a batch is published
atomically; two writers cannot both add record n; and an engine that has been replaced meets its successor's `claim`
where it wanted to put its own record. A data file that no record names does not exist for a reader.

Nothing here costs more with every batch that was there before: `ManifestLog` keeps what the records say, not the
records, and `summary` spares the next engine reading them all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

MANIFEST_DIR: Final = "_manifest"
SUMMARY: Final = "summary"  # not `….json`: readers take those for records
SUMMARY_EVERY: Final = 100  # records; that many are read at the start, and writing it costs next to nothing
STAGING_DIR: Final = "_staging"
DATA_DIR: Final = "data"


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of the log."""

    kind: str
    sink: str
    generation: int
    from_epoch: int | None = None
    to_epoch: int | None = None
    type: str = "upsert"
    key: tuple[str, ...] = ()
    files: tuple[dict[str, Any], ...] = field(default_factory=tuple)
    version: int = 1


@dataclass(frozen=True, slots=True)
class SinkState:
    """What the records say about one sink."""

    epoch: int | None = None
    generation: int = -1
    type: str = ""
    key: tuple[str, ...] = ()  # of the last batch, as its type

    def after(self, record: Record) -> SinkState:
        """A claim keeps the epoch and raises the generation."""
        return SinkState(
            self.epoch if record.kind == "claim" else record.to_epoch,
            max(self.generation, record.generation),
            record.type if record.kind == "batch" else self.type,
            record.key if record.kind == "batch" else self.key,
        )


class ManifestLog:
    """Reads and extends the log under one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.next = 0  # the number of the first record that is not read yet
        self._sinks: dict[str, SinkState] = {}
        self._summarised = 0

    def state(self, sink: str) -> SinkState | None:
        """What the log says about a sink now; asks the directory for new records."""
        if self.next == 0:
            self._start()
        while (record := self._read(self.next)) is not None:
            self._sinks[record.sink] = self._sinks.get(record.sink, SinkState()).after(record)
            self.next += 1
        return self._sinks.get(sink)

    def records(self, first: int = 0) -> Iterator[Record]:
        """The records from a number on, in order."""
        while (record := self._read(first)) is not None:
            yield record
            first += 1

    def append(self, record: Record) -> bool:
        """Add a record behind those that `state` has seen last; False if another writer was first."""
        directory = self.path / MANIFEST_DIR
        directory.mkdir(parents=True, exist_ok=True)
        with _written(directory, json.dumps(asdict(record)), sync=True) as temporary:
            try:
                os.link(temporary, self._name(self.next))
            except FileExistsError:
                return False
            _sync_directory(directory)
        if self.next - self._summarised >= SUMMARY_EVERY:
            with contextlib.suppress(OSError):  # the record is there; this is only for the next start
                self._summarise()
        return True

    def _start(self) -> None:
        """Begin where the summary ends, if it is of this log: the record before that is the one that it names."""
        try:
            summary = json.loads((self.path / MANIFEST_DIR / SUMMARY).read_text(encoding="utf-8"))
            number = int(summary["next"])
            if summary["version"] != 1 or self._digest(number - 1) != summary["last"]:
                return
            sinks = {name: SinkState(**{**s, "key": tuple(s["key"])}) for name, s in summary["sinks"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return
        self.next, self._sinks, self._summarised = number, sinks, number

    def _summarise(self) -> None:
        """Of what was read, not of what was appended last: that is read like any other record."""
        if self.next == 0:
            return
        sinks = {name: asdict(state) for name, state in self._sinks.items()}
        summary = {"version": 1, "next": self.next, "last": self._digest(self.next - 1), "sinks": sinks}
        directory = self.path / MANIFEST_DIR
        with _written(directory, json.dumps(summary)) as temporary:
            os.replace(temporary, directory / SUMMARY)
        self._summarised = self.next

    def _digest(self, number: int) -> str:
        return hashlib.sha256(self._name(number).read_bytes()).hexdigest()

    def _name(self, number: int) -> Path:
        return self.path / MANIFEST_DIR / f"{number:020d}.json"

    def _read(self, number: int) -> Record | None:
        try:
            data = json.loads(self._name(number).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Record(**{**data, "key": tuple(data["key"]), "files": tuple(data["files"])})


@dataclass(frozen=True, slots=True)
class Staging:
    """The attempts of one sink that are under way: one small file each, so that nobody has to look at all the others.

        {"directory": "data/…", "generation": g, "after": n}      a record of the attempt can only be n or a later one

    The file is there before the directory and goes after it, or after the record. What a dead engine has left is found
    by its file; whether it counts is looked up in the records from `after` on.
    """

    path: Path
    sink: str

    @property
    def _folder(self) -> Path:
        return self.path / STAGING_DIR / hashlib.sha256(self.sink.encode()).hexdigest()[:16]

    @property
    def known(self) -> bool:
        """False: an older release, which left no notes, may have written here."""
        return self._folder.is_dir()

    def begin(self, attempt: str, directory: str, generation: int, after: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        note = {"directory": directory, "generation": generation, "after": after}
        with _written(self._folder, json.dumps(note)) as temporary:
            os.replace(temporary, self._folder / attempt)

    def end(self, attempt: str) -> None:
        with contextlib.suppress(OSError):  # looked at again by the next `sweep`
            (self._folder / attempt).unlink()

    def sweep(self, log: ManifestLog, generation: int) -> None:
        """Remove what attempts left that no record names. Only the owner calls this, with no attempt under way."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.iterdir():
            self.settle(file.name, log, generation)

    def settle(self, attempt: str, log: ManifestLog, generation: int) -> None:
        """Forget an attempt, with its files if no record names them."""
        note = _note(self._folder / attempt)
        if note is None:  # it was being written when its engine died: there was no directory yet
            self.end(attempt)
            return
        if note["generation"] > generation:  # what a newer engine stages is not ours to remove
            return
        named = {directory_of(f["path"]) for r in log.records(note["after"]) for f in r.files}
        if note["directory"] not in named:
            shutil.rmtree(self.path / note["directory"], ignore_errors=True)
        self.end(attempt)


def _note(file: Path) -> dict[str, Any] | None:
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
        return note if {"directory", "generation", "after"} <= set(note) else None
    except (OSError, ValueError, TypeError):
        return None


def directory_of(path: str) -> str:
    return path.rsplit("/", 1)[0]


@contextlib.contextmanager
def _written(directory: Path, text: str, *, sync: bool = False) -> Iterator[Path]:
    """A file of a temporary name, which is gone at the end; synced where more than tidiness depends on it."""
    temporary = directory / f".{uuid.uuid4().hex}.tmp"
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def batches(records: Iterable[Record], sink: str | None = None) -> list[Record]:
    """The data records, oldest first."""
    return [r for r in records if r.kind == "batch" and sink in (None, r.sink)]


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
