"""Segments that are looked into again and again, ready for it: columns that can be read at single rows, and an index.

A Parquet file gives rows only by decoding whole pages of its columns. So what look-ups ask a large segment for is kept
beside it, one file for each column and one for the index, memory-mapped: a look-up reads some pages of the operating
system's cache whatever the size of the segment. Segments never change, so nothing here is ever wrong; all of it can be
deleted at any time, and is made again when it is asked for. Small segments are kept in the worker's memory.

    <data directory>/cache/<segment>/<column>.arrow   Arrow IPC, uncompressed; on the worker's own disk where the data
    <data directory>/cache/<segment>/<key>.npy        directory is not local. Rows 0 and 1: hash of the key, ascending,
                                                      and the number of its row
    <data directory>/cache/<segment>/<key>.json       the columns that the index is of
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headwater.model.key_hash import key_hashes
from headwater.model.schema import Schema
from headwater.storage.files import CACHE, DataDir, cache_entry
from headwater.storage.private import make_directory, make_file, temporary_directory
from headwater.storage.segments import arrow_schema, read_segments

SMALL_ROWS: Final = 65_536  # decoded whole in some milliseconds, and then held in memory
HELD_BYTES: Final = 64 << 20  # of small segments, in one worker
HELD_HANDLES: Final = 512
MAX_COLUMN_BYTES: Final = 1 << 30  # beyond this a column is read where it is: Arrow's strings end at 2 GiB
UNUSED_S: Final = 600.0  # after which what is on a worker's own disk is removed

Index = NDArray[np.uint64]


class SegmentIndex:
    """One segment. Opened by `opened`; a column that the file does not have is NULL."""

    def __init__(self, data_dir: DataDir, schema: Schema, path: str) -> None:
        self._data_dir, self._schema, self._path = data_dir, schema, path
        fs, target = data_dir.path(path)
        self.rows = int(pq.read_metadata(target, filesystem=fs).num_rows)
        self.held_bytes = 0
        self._folder = None if self.rows <= SMALL_ROWS else _folder(data_dir, path)
        self._columns: dict[str, pa.Array] = {}
        self._indices: dict[tuple[str, ...], Index] = {}

    def find(self, key: tuple[str, ...], hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The rows whose key may be one of those that the (different) hashes stand for."""
        index = self._index(key)
        left = np.searchsorted(index[0], hashes, "left")
        count = np.searchsorted(index[0], hashes, "right") - left
        ends = np.cumsum(count)
        places = np.repeat(left - ends + count, count) + np.arange(int(ends[-1]) if len(ends) else 0)
        return np.sort(index[1][places].astype(np.int64))

    def take(self, names: Sequence[str], rows: NDArray[np.int64]) -> pa.Table:
        where = pa.array(rows)
        return pa.table({name: self._column(name).take(where) for name in names})

    def whole(self, names: Sequence[str]) -> pa.Table:
        return pa.table({name: self._column(name) for name in names})

    def prepare_like(self, other: SegmentIndex) -> None:
        """Have everything that look-ups have asked the other for."""
        if self._folder is None or other._folder is None or not other._folder.exists():
            return
        for names in other._folder.glob("*.json"):
            self._index(tuple(json.loads(names.read_text(encoding="utf-8"))))
        for name in self._schema.names:
            if (other._folder / _column_file(name)).exists():
                self._column(name)

    def _index(self, key: tuple[str, ...]) -> Index:
        if key not in self._indices:
            found = self._kept(_index_file(key), lambda to: self._save_index(to, key), _load_index)
            self._indices[key] = self._sorted(key) if found is None else found
        return self._indices[key]

    def _save_index(self, to: Path, key: tuple[str, ...]) -> None:
        names = to.with_name(Path(_index_file(key)).stem + ".json")
        make_file(names)
        np.save(to, self._sorted(key))
        names.write_text(json.dumps(key), encoding="utf-8")

    def _sorted(self, key: tuple[str, ...]) -> Index:
        rows = pa.table({name: self._column(name) for name in key})
        hashes = key_hashes(rows, key)
        order = np.argsort(hashes, kind="stable")
        return np.stack([hashes[order], order.astype(np.uint64)])

    def _column(self, name: str) -> pa.Array:
        if name not in self._columns:
            found = self._kept(_column_file(name), lambda to: _save_column(to, self._read(name)), _load_column)
            if found is None:
                found = self._read(name)
                self.held_bytes += found.nbytes
            # The file may be of a time when the column had a narrower type.
            self._columns[name] = found.cast(arrow_schema(self._schema).field(name).type)
        return self._columns[name]

    def _read(self, name: str) -> pa.Array:
        column = read_segments(self._data_dir, self._schema, [self._path], [name]).column(0)
        if column.nbytes > MAX_COLUMN_BYTES:
            raise TooLarge
        return column.combine_chunks()

    def _kept(self, name: str, save: Any, load: Any) -> Any:
        """What a file of the cache holds, which is made if it is not there; None if there can be none."""
        if self._folder is None:
            return None
        file = self._folder / name
        try:
            if not file.exists():
                make_directory(self._folder)
                made = file.with_suffix(f".{uuid.uuid4().hex}{file.suffix}")
                try:
                    make_file(made)
                    save(made)
                    made.replace(file)
                finally:
                    made.unlink(missing_ok=True)
            os.utime(self._folder)
            return load(file)
        except OSError:  # a full disk; or it was removed just now
            return None


def _index_file(key: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(key).encode()).hexdigest()[:16] + ".npy"


def _column_file(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16] + ".arrow"


class TooLarge(Exception):
    """A column that is better read where it is."""


Known = tuple[str, str, tuple[tuple[str, str], ...]]  # data directory, path, columns with their types
_open: OrderedDict[Known, SegmentIndex] = OrderedDict()


def _known(data_dir: DataDir, schema: Schema, path: str) -> Known:
    return data_dir.root, path, tuple((c.name, c.type) for c in schema.columns)


def opened(data_dir: DataDir, schema: Schema, path: str) -> SegmentIndex:
    """The segment as this worker has it; the last used ones stay open."""
    key = _known(data_dir, schema, path)
    found = _open.pop(key, None) or SegmentIndex(data_dir, schema, path)
    _open[key] = found
    while len(_open) > HELD_HANDLES or sum(s.held_bytes for s in _open.values()) > HELD_BYTES:
        if len(_open) == 1:
            break
        _open.popitem(last=False)
    return found


def is_open(data_dir: DataDir, schema: Schema, path: str) -> bool:
    return _known(data_dir, schema, path) in _open


def _folder(data_dir: DataDir, path: str) -> Path:
    if data_dir.is_local:
        _, place = data_dir.path(cache_entry(path))
        return Path(place)
    root = temporary_directory(CACHE)
    _remove_unused(root)
    return root / hashlib.sha256(data_dir.url(path).encode()).hexdigest()[:32]


def _remove_unused(root: Path) -> None:
    for entry in root.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - entry.stat().st_mtime > UNUSED_S:
                shutil.rmtree(entry, ignore_errors=True)


def _save_column(to: Path, column: pa.Array) -> None:
    table = pa.table({"c": column})
    with pa.OSFile(str(to), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


def _load_column(file: Path) -> pa.Array:
    with pa.memory_map(str(file)) as source:
        return pa.ipc.open_file(source).read_all().column(0).combine_chunks()


def _load_index(file: Path) -> Index:
    found: Index = np.load(file, mmap_mode="r")
    return found
