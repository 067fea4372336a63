"""`spark.read.format("headwater")` and `spark.readStream.format("headwater")`, from any Spark session.

    read        a snapshot at an epoch        options: path, table, epoch (the last committed one by default)
    readStream  the change log, restartable   options: path, table, startingEpoch (default: the table as it is, first)

Spark asks a Python source for its columns before it says whether it wants a table or a stream. So both have the same:
the table's, `_change_type`, `_commit_version` and `_commit_timestamp`. In a snapshot every row is an `insert` of the
epoch that was read; `changeColumns=false` leaves the three out there.

It reads the meta store without writing to it, beside a running engine or without one. Planning happens here; what a
task does is `source_rows.py`. Epochs older than the engine's `retention_s` cannot be read (EPOCH_NOT_AVAILABLE).

A stream's offset is `{"epoch": n, "table": id}`: a batch holds the changes of the epochs in (start, end]. From offset 0
it is the table as of `end`, as inserts. An offset is the epoch of the table's last change, so that an idle table gives
no batches, however far the engine's epochs go on. A table that was dropped and made again has another id.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from headwater.config import check_secrets, reveal
from headwater.errors import UsageError
from headwater.model.schema import CHANGE_NAMES, Schema, quoted
from headwater.runtime.registry import Registry, schema_of
from headwater.spark.source_rows import CHANGE_COLUMNS, File, Slice
from headwater.storage import tables as t
from headwater.storage.checkpoint import JobRow, Segment
from headwater.storage.files import DataDir
from headwater.storage.location import data_directory, existing_meta_store
from headwater.storage.meta import MetaStore

# As much as a task decodes in a few seconds; a table of less is one task.
BYTES_PER_TASK: Final = 32 * 1024 * 1024


def register(spark: SparkSession) -> None:
    """Make the format known to a session that has not found `pyspark_headwater` by itself."""
    spark.dataSource.register(HeadwaterSource)


class HeadwaterSource(DataSource):  # type: ignore[misc]
    """See the head of this module."""

    @classmethod
    def name(cls) -> str:
        return "headwater"

    def schema(self) -> str:
        with _opened(self.options) as table:
            columns = [f"{quoted(c.name)} {c.type}" for c in table.schema.visible]
        if _with_changes(self.options):
            columns.append(CHANGE_COLUMNS)
        return ", ".join(columns)

    def reader(self, schema: Any) -> DataSourceReader:
        return SnapshotReader(dict(self.options))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return ChangeReader(dict(self.options))


@dataclass(frozen=True)
class Part(InputPartition):  # type: ignore[misc]
    """What one task reads: a range of vnodes of the given segments."""

    slice: Slice
    files: tuple[File, ...]
    before: tuple[File, ...] = ()
    after: int = 0
    upto: int = 0
    kind: str = "inserted"


class SnapshotReader(DataSourceReader):  # type: ignore[misc]
    """A table as of one epoch."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        with _opened(self.options) as table:
            epoch = table.epoch(self.options.get("epoch"))
            files = table.files_at(epoch)
            return [Part(piece, files, upto=epoch) for piece in table.slices(files)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Part)
        names = [c.name for c in partition.slice.schema.visible]
        if _with_changes(self.options):
            names += CHANGE_NAMES
        for rows in partition.slice.inserted(partition.files, partition.upto):
            yield from rows.select(names).to_batches()


class ChangeReader(DataSourceStreamReader):  # type: ignore[misc]
    """The change log of a table."""

    def __init__(self, options: Mapping[str, str]) -> None:
        if not _with_changes(options):
            raise UsageError("OPTION_VALUE", "changeColumns=false is for spark.read: a stream is made of changes")
        self.options = options

    def initialOffset(self) -> dict[str, int]:
        wanted = self.options.get("startingepoch") or self.options.get("startingEpoch")
        with _opened(self.options) as table:
            if wanted is None or wanted == "earliest":
                return table.offset(0)
            return table.offset(table.newest() if wanted == "latest" else table.epoch(wanted))

    def latestOffset(self) -> dict[str, int]:
        with _opened(self.options) as table:
            return table.offset(table.newest())

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        after, upto = int(start["epoch"]), int(end["epoch"])
        with _opened(self.options) as table:
            if after and start.get("table", table.job.id) != table.job.id:
                raise UsageError(
                    "UPSTREAM_DROPPED",
                    f"table {table.job.name} was dropped, and made again since this stream read it",
                    hint="start the stream with a new checkpoint location: it begins with the table as it is",
                )
            if upto <= after:
                return []
            if after == 0:
                files = table.files_at(table.readable(upto))
                return [Part(piece, files, upto=upto) for piece in table.slices(files)]
            return list(table.change_parts(table.readable(after), upto))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Part)
        piece = partition.slice
        if partition.kind == "inserted":
            found = piece.inserted(partition.files, partition.upto)
        elif partition.kind == "replaced":
            found = iter([piece.replaced(partition.before, partition.files, partition.upto)])
        else:
            found = iter([piece.changes(partition.files, partition.before, partition.after)])
        for rows in found:
            if rows is not None:
                yield from rows.to_batches()

    def commit(self, end: dict[str, int]) -> None:
        """Nothing to do: what is retained is the engine's decision."""

    def stop(self) -> None:
        """Nothing is held open between two batches."""


class ReadOnlyMeta(MetaStore):
    """A meta store that another process owns: it is never created, migrated or written to."""

    def _prepare(self) -> None:
        with self.read() as db:
            version = db.execute(sa.select(t.settings.c.value).where(t.settings.c.name == "schema_version")).scalar()
        if version is None or int(version) != t.SCHEMA_VERSION:
            raise UsageError(
                "META_STORE_VERSION",
                f"the meta store has schema {version}, this Headwater knows {t.SCHEMA_VERSION}",
                hint="install the same Headwater here as the engine has",
            )

    def added_between(self, table_id: int, after: int, upto: int) -> bool:
        c = t.segments.c
        return bool(self._segments(c.table_id == table_id, c.added_epoch > after, c.added_epoch <= upto))


@dataclass(frozen=True, slots=True)
class OpenTable:
    """One table of a data directory, with its meta store open."""

    meta: ReadOnlyMeta
    data_dir: DataDir
    job: JobRow
    schema: Schema

    def epoch(self, text: str | None) -> int:
        """The epoch that was asked for, if it is committed and retained."""
        last = self.meta.committed_epoch()
        if text is None:
            return last
        if not str(text).isdigit():
            raise UsageError("OPTION_VALUE", f"option epoch takes a number, not {text}", hint="an epoch of hw_epochs")
        epoch = int(text)
        first = max(
            self.meta.oldest_epoch(), self.job.live_epoch if self.job.kind == "view" else self.job.created_epoch
        )
        known = first <= epoch <= last and self.meta.epochs_between(epoch - 1, epoch)
        if not known or self.meta.had_stopped(self.job, epoch):
            raise self._not_available(epoch, first, last)
        return epoch

    def offset(self, epoch: int) -> dict[str, int]:
        return {"epoch": epoch, "table": self.job.id}

    def newest(self) -> int:
        """The epoch of the table's last change, 0 if it never had one; it never goes back."""
        return self.meta.changed_epoch(self.job.id)

    def readable(self, epoch: int) -> int:
        """An epoch at which the table is as it was at this one, and which is still retained."""
        oldest = self.meta.oldest_epoch()
        if epoch >= oldest:
            return epoch
        unchanged = self.meta.segments_at(self.job.id, oldest) and not self.meta.added_between(
            self.job.id, epoch, oldest
        )
        if unchanged or epoch >= self.newest():
            return oldest
        raise self._not_available(epoch, oldest, self.meta.committed_epoch())

    def _not_available(self, epoch: int, first: int, last: int) -> UsageError:
        return UsageError(
            "EPOCH_NOT_AVAILABLE",
            f"epoch {epoch} of {self.job.name} is not available",
            detail=f"retained: {first} to {last}",
            hint="choose a newer epoch (a stream: a new checkpoint location), or raise retention_s",
        )

    def files_at(self, epoch: int) -> tuple[File, ...]:
        return _files(self.meta.segments_at(self.job.id, epoch))

    def slices(self, files: tuple[File, ...]) -> list[Slice]:
        """Equal ranges of vnodes, as many as the files' size asks for."""
        sizes = {s.path: s.bytes for s in self.meta.all_segments()}
        count = int(self.meta.setting("parameter:vnode_count", "256") or 256)
        pieces = min(count, 1 + sum(sizes.get(f.path, 0) for f in files) // BYTES_PER_TASK)
        bounds = [count * i // pieces for i in range(pieces + 1)]
        return [
            Slice(self.data_dir, self.schema, low, high, count) for low, high in itertools.pairwise(bounds) if files
        ]

    def change_parts(self, after: int, upto: int) -> Iterator[Part]:
        """Tasks for (after, upto]; an epoch that replaced the table is compared as a whole."""
        first = after
        for reset in sorted(self.meta.reset_epochs(self.job.id, after, upto)):
            yield from self._between(first, reset - 1)
            before, now = self.files_at(reset - 1), self.files_at(reset)
            for piece in self.slices(before + now):
                yield Part(piece, now, before, reset - 1, reset, "replaced")
            first = reset
        yield from self._between(first, upto)

    def _between(self, after: int, upto: int) -> Iterator[Part]:
        files = _files(self.meta.change_segments(self.job.id, after, upto))
        before = self.files_at(after)
        for piece in self.slices(files):
            yield Part(piece, files, before, after, upto, "changes")


def _files(segments: list[Segment]) -> tuple[File, ...]:
    return tuple(File(s.path, s.kind == "base", s.added_epoch) for s in segments)


@contextmanager
def _opened(options: Mapping[str, str]) -> Iterator[OpenTable]:
    path, name = options.get("path"), options.get("table")
    if not path or not name:
        raise UsageError("OPTION_MISSING", "the format headwater needs the options path and table")
    directory = data_directory(path)
    url = options.get("metastore")
    if url is None:
        url = existing_meta_store(directory)
        if url.startswith("sqlite:///"):
            url = f"sqlite:///file:{url.removeprefix('sqlite:///')}?mode=ro&uri=true"
    else:
        check_secrets({"metastore": url})
    meta = ReadOnlyMeta(reveal(url))
    try:
        job = Registry(meta.job_rows()).find(name, "table", "view")
        if job.kind == "view" and job.state == "creating":
            raise UsageError("VIEW_CREATING", f"view {job.name} is still being created", hint="wait until it is live")
        yield OpenTable(meta, DataDir(str(directory)), job, schema_of(job))
    finally:
        meta.close()


def _with_changes(options: Mapping[str, str]) -> bool:
    return str(options.get("changecolumns", options.get("changeColumns", "true"))).lower() != "false"
