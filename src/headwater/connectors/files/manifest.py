"""The manifest log of a files sink: which data files count, in order, and how far the sink has come.

    <path>/_manifest/00000000000000000007.json     one record per file, numbered without gaps
    <path>/data/<sink>-<to_epoch>-<generation>-<attempt>/part-….parquet

    {"version": 1, "kind": "claim" | "batch" | "reset", "sink": …, "generation": g, "from_epoch": a, "to_epoch": b,
     "type": "upsert" | "append-only", "key": […], "files": [{"path": relative, "rows": n, "bytes": m}, …]}

A record is written to a temporary name, synced, and then linked to its number: `link` fails if the number is taken,
so each number is written once, complete or not at all. That one rule gives all three promises: a batch is published
atomically; two writers cannot both add record n; and an engine that has been replaced meets its successor's `claim`
where it wanted to put its own record. A data file that no record names does not exist for a reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

MANIFEST_DIR: Final = "_manifest"
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


class ManifestLog:
    """Reads and extends the log under one directory. Records already read are kept: they never change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: list[Record] = []

    def records(self) -> list[Record]:
        """All records, in order; asks the directory for new ones."""
        while (record := self._read(len(self._records))) is not None:
            self._records.append(record)
        return self._records

    def append(self, record: Record) -> bool:
        """Add a record behind those that `records` returned last; False if another writer was first."""
        directory = self.path / MANIFEST_DIR
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".{uuid.uuid4().hex}.tmp"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(asdict(record), file)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, self._name(len(self._records)))
            except FileExistsError:
                return False
            _sync_directory(directory)
            return True
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()

    def _name(self, number: int) -> Path:
        return self.path / MANIFEST_DIR / f"{number:020d}.json"

    def _read(self, number: int) -> Record | None:
        try:
            data = json.loads(self._name(number).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Record(**{**data, "key": tuple(data["key"]), "files": tuple(data["files"])})


def batches(records: Iterable[Record], sink: str | None = None) -> list[Record]:
    """The data records, oldest first."""
    return [r for r in records if r.kind == "batch" and sink in (None, r.sink)]


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
