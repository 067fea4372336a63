"""What the sinks into table formats over files (Delta, Iceberg) share: staging, copy on write, and the commit's loop.

    <table>/headwater-<sink>-<epoch>-<generation>-<attempt>/
        op=1/part-….parquet   rows of the batch: data files as they are
        op=2/part-….parquet   keys of deleted rows, only read while writing
        kept/part-….parquet   rewritten files: what the batch left of old ones

`write` is Spark's alone (`spark/lake.py`): it stages the batch by Spark's native writer, finds the data files that hold
a key of the batch (by the files' statistics, then by a join on the key columns), and rewrites only those without these
keys. `commit` is metadata alone: one commit of the format adds the new files, removes the rewritten ones and moves the
progress. Small files are folded together by the same rewriting when there are many of them.

What was rewritten is right only for the files that were looked at. So the token remembers the set of the table's files,
and a commit that finds another set (somebody else has written) is given up and written again.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlparse

import pyarrow as pa
from pyarrow import fs

from headwater.errors import DefiniteError, HeadwaterError, TransientError
from headwater.model.schema import Column
from headwater.model.types import arrow_type
from headwater.sink.base import BaseSink
from headwater.sink.options import SinkOptions
from headwater.sink.sink import Progress, Token, Verdict, fenced, judge_progress

RACES: Final = 20  # other writers may commit between our read and our commit this often
SMALL_FILE_BYTES: Final = 8 << 20  # such files are folded together …
SMALL_FILES: Final = 48  # … when there are more of them than this: reading each costs more than rewriting it once


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file of the table: where it is for Spark, how large, and what the format needs to remove it."""

    url: str
    bytes: int
    handle: Any = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and greatest value of a key column in a batch, for pruning by statistics."""

    low: Any
    high: Any
    has_null: bool


class LakeSink(BaseSink):
    """A connector gives the six methods below; everything else is here."""

    def __init__(
        self, name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int
    ) -> None:
        super().__init__(name, options, columns, key, generation)
        self._digest = hashlib.sha256(name.encode()).hexdigest()[:12]

    # -- what a connector gives -------------------------------------------------------------------------------------

    @abstractmethod
    def load(self) -> Any:
        """The table as it is now; TransientError [SINK_TARGET_MISSING] where there is none."""

    @abstractmethod
    def create(self) -> None:
        """Make an empty table of the sink's columns."""

    @abstractmethod
    def check(self, table: Any) -> dict[str, pa.DataType]:
        """Raise if the table cannot be a target of this sink; gives its columns with their types."""

    @abstractmethod
    def progress(self, table: Any) -> Progress | None:
        """What the table says about this sink."""

    @abstractmethod
    def files(self, table: Any, bounds: Mapping[str, Bounds]) -> list[LiveFile]:
        """The data files of the table that may hold a key within the bounds (no bounds: all of them)."""

    @abstractmethod
    def try_commit(self, table: Any, epoch: int | None, added: Sequence[str], removed: Sequence[LiveFile]) -> bool:
        """One commit: files, owner and, unless None, the epoch (−1: back to nothing); False if another was first."""

    @abstractmethod
    def location(self, table: Any) -> str:
        """The directory of the table, for Spark and for pyarrow."""

    def tidy(self) -> None:
        """Called after a commit: keep the format's own metadata small. Must not fail."""

    widened: frozenset[str] = frozenset()  # columns that the format has only as INT

    # -- the contract -----------------------------------------------------------------------------------------------

    def validate(self, columns: Sequence[Column], key: Sequence[str]) -> None:
        try:
            table = self.load()
        except TransientError as error:
            if error.code != "SINK_TARGET_MISSING":
                raise
            if not self.options["create_table_if_not_exists"]:
                raise DefiniteError(error.code, error.message, detail=error.detail, hint=error.hint) from None
            self.create()
            return
        self._fitting(table)

    def claim(self) -> None:
        for _ in range(RACES):
            table = self._owned()
            stored = self.progress(table)
            if stored is not None and stored.generation == self.generation:
                return
            if self.try_commit(table, None, [], []):
                return
        raise self._busy()

    def prepare(self, from_epoch: int, to_epoch: int) -> Token:
        table = self._owned()
        self._remove_stale(table)
        token = self.token(from_epoch, to_epoch)
        name = f"headwater-{self._digest}-{to_epoch}-{self.generation}-{token.attempt}"
        directory = f"{self.location(table)}/{name}"
        return token.written(rows=0, directory=directory)

    def write(self, token: Token, df: Any) -> Token:
        from headwater.spark import lake

        table = self.load()
        self._fitting(table)
        everything = self.files(table, {}) if self.upsert else []
        directory = token.payload["directory"]
        merge = self.upsert and bool(everything)
        staged = lake.stage(
            df, directory, columns=self.column_names, widen=self.widened, prune=self._prunable(), by_op=merge
        )
        removed: list[LiveFile] = []
        if merge and staged.rows:
            removed = self._rewrite(table, everything, staged, directory, df.sparkSession)
        added, size = self._data_files(directory)
        return token.written(
            rows=staged.rows,
            bytes=size,
            added=added,
            removed=[f.url for f in removed],
            seen=_fingerprint(everything) if self.upsert else "",
        )

    def commit(self, token: Token) -> None:
        for _ in range(RACES):
            table = self.load()
            if judge_progress(self.progress(table), token) is Verdict.ALREADY:
                self._forget(table, token)
                break
            if self.try_commit(table, token.to_epoch, token.payload["added"], self._still_there(table, token)):
                break
        else:
            raise self._busy()
        self.tidy()

    def last_committed(self) -> int | None:
        stored = self.progress(self.load())
        return stored.epoch if stored is not None else None

    def reset(self, to_epoch: int | None) -> None:
        for _ in range(RACES):
            if self.try_commit(self._owned(), -1 if to_epoch is None else to_epoch, [], []):
                return
        raise self._busy()

    def abort(self, token: Token) -> None:
        self._remove(token.payload["directory"])

    def _fitting(self, table: Any) -> None:
        """The table takes files as they are: a column of another type would make it unreadable."""
        found = self.check(table)
        if missing := [c for c in self.column_names if c not in found]:
            raise self.target_changed(f"has no column {', '.join(missing)}")
        for column in self.columns:
            there, ours = spelt(found[column.name]), spelt(arrow_type(column.type))
            if there != (spelt(pa.int32()) if column.name in self.widened else ours):
                raise self.target_changed(f"has column {column.name} as {there}, the sink has {ours}")

    # -- pieces -----------------------------------------------------------------------------------------------------

    def _rewrite(
        self, table: Any, everything: list[LiveFile], staged: Any, directory: str, spark: Any
    ) -> list[LiveFile]:
        """Write the files that a key of the batch is in without these keys; gives the files that this replaces."""
        from headwater.spark import lake

        columns = [(c.name, "INT" if c.name in self.widened else c.type) for c in self.columns]
        known = {c.name for c in self.columns} >= set(self.check(table))
        old = lake.OldFiles(spark, columns if known else None, self.key, directory)
        candidates = self.files(table, staged.bounds)
        touched = set(old.touched([f.url for f in candidates]))
        small = [f for f in everything if f.bytes < SMALL_FILE_BYTES]
        chosen = [f for f in everything if plain(f.url) in touched or (len(small) > SMALL_FILES and f in small)]
        if chosen:
            old.rewrite([f.url for f in chosen])
        return chosen

    def _still_there(self, table: Any, token: Token) -> list[LiveFile]:
        """The files to remove, if the table has exactly the files that it had while the batch was written."""
        if not self.upsert:
            return []
        everything = self.files(table, {})
        if _fingerprint(everything) != token.payload["seen"]:
            message = f"the table of sink {self.name} was written to by someone else"
            raise TransientError("SINK_TARGET_BUSY", message)
        removed = set(token.payload["removed"])
        return [f for f in everything if f.url in removed]

    def _prunable(self) -> tuple[str, ...]:
        """Key columns whose order is the same in Spark, in Arrow and in the files' statistics."""
        kinds = {c.name: arrow_type(c.type) for c in self.columns}
        fine = (pa.types.is_integer, pa.types.is_string, pa.types.is_date)
        return tuple(k for k in self.key if any(test(kinds[k]) for test in fine))

    def _owned(self) -> Any:
        table = self.load()
        stored = self.progress(table)
        if stored is not None and stored.generation > self.generation:
            raise fenced(self.name)
        return table

    def _data_files(self, directory: str) -> tuple[list[str], int]:
        """New data files that hold rows, with their bytes. What holds none is removed, and so is what was only read."""
        import pyarrow.parquet as pq

        filesystem, root = filesystem_of(directory)
        added: list[str] = []
        size = 0
        self._remove(f"{directory}/op=2")
        for part in ("op=1", "kept"):
            before = len(added)
            selector = fs.FileSelector(f"{root}/{part}", recursive=True, allow_not_found=True)
            for info in filesystem.get_file_info(selector):
                if not info.path.endswith(".parquet"):
                    continue
                with filesystem.open_input_file(info.path) as file:
                    rows = pq.read_metadata(file).num_rows
                if rows:
                    added.append(f"{directory}/{info.path[len(root) + 1 :]}")
                    size += info.size
                else:
                    _delete_file(filesystem, info.path)
            if len(added) == before:
                self._remove(f"{directory}/{part}")
        if not added:
            self._remove(directory)
        return added, size

    def _remove_stale(self, table: Any) -> None:
        """Directories of attempts that were never committed: their epoch is after all that the table holds of ours."""
        filesystem, root = filesystem_of(self.location(table))
        done = self.progress(table)
        epoch = done.epoch if done is not None and done.epoch is not None else -1
        found = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
        stale = [i.base_name for i in found if i.base_name.startswith(f"headwater-{self._digest}-")]
        stale = [name for name in stale if self._abandoned(name, epoch)]
        if not stale:
            return
        used = self._used(table)
        for name in stale:
            if name not in used:
                self._remove(f"{self.location(table)}/{name}")

    def _abandoned(self, name: str, done: int) -> bool:
        """Files of an earlier, committed epoch may have been replaced since; older snapshots still need them. What a
        newer engine stages is not ours to remove, whatever we believed when we looked for it.
        """
        _, _, epoch, *rest = name.split("-")
        return int(epoch) > done and (len(rest) < 2 or int(rest[0]) <= self.generation)

    def _forget(self, table: Any, token: Token) -> None:
        """Remove what an attempt staged that another one has delivered already."""
        if not self._used(table) & {token.payload["directory"].rsplit("/", 1)[-1]}:
            self._remove(token.payload["directory"])

    def _used(self, table: Any) -> set[str]:
        """The directories of the files that the table has."""
        return {f.url.rsplit("/", 2)[0].rsplit("/", 1)[-1] for f in self.files(table, {})}

    def _remove(self, directory: str) -> None:
        filesystem, root = filesystem_of(directory)
        with contextlib.suppress(OSError):
            filesystem.delete_dir(root)

    def _busy(self) -> HeadwaterError:
        return TransientError("SINK_BUSY", f"too many writers at the target of sink {self.name}")


def _delete_file(filesystem: Any, path: str) -> None:
    """A file, and the sum that Hadoop puts beside it."""
    folder, _, name = path.rpartition("/")
    for gone in (path, f"{folder}/.{name}.crc"):
        with contextlib.suppress(OSError):
            filesystem.delete_file(gone)


def filesystem_of(path: str) -> tuple[Any, str]:
    found: tuple[Any, str] = fs.FileSystem.from_uri(path)
    return found


def spelt(kind: pa.DataType) -> str:
    """A type as a text that is the same for all of Arrow's layouts of it."""
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return spelt(pa.string())
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return spelt(pa.binary())
    if pa.types.is_map(kind):
        return f"map<{spelt(kind.key_type)}, {spelt(kind.item_type)}>"
    if pa.types.is_nested(kind) and not pa.types.is_struct(kind):
        return f"array<{spelt(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{f.name}: {spelt(f.type)}' for f in kind.fields)}>"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    return str(kind)


def plain(url: str) -> str:
    """A file's name without scheme and escapes: Spark and the formats spell the same file differently."""
    if "://" not in url and not url.startswith("file:"):
        return url
    parts = urlparse(url)
    return f"{parts.netloc}{unquote(parts.path)}"


def _fingerprint(files: Iterable[LiveFile]) -> str:
    return hashlib.sha256("\n".join(sorted(f.url for f in files)).encode()).hexdigest()
