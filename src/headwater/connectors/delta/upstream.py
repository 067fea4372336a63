"""A Delta table with change data feed as an upstream: its epochs are its versions. Read with `deltalake` alone.

`DeltaUpstream` is what the engine knows (contract: `backfill/snapshot/consume_upstream/upstream.py`); `CopyFiles` and
`TakeChanges` are the tasks that read rows, in workers.

Within a version the feed gives deletes and preimages, inserts and postimages in any order. A preimage is the delete of
its key: where an update changed the key, the old one must go. So the newest change of a key is the one with the
highest version, and in it an insert or a postimage before a delete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from headwater.config import is_reference, reveal
from headwater.errors import DefiniteError, HeadwaterError, TransientError
from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, SEQ, Schema
from headwater.model.types import arrow_type
from headwater.storage.files import DataDir
from headwater.storage.segments import newest_per_key, write_segment

FEED = "delta.enableChangeDataFeed"
_UNREADABLE = {"deletionVectors", "columnMapping"}
_LOST = ("not found", "No such file", "contiguous commit files", "does not exist", "Invalid table version", "missing")


@dataclass(frozen=True, slots=True)
class DeltaUpstream:
    """One Delta table; `name` is ours, for messages. `storage` has references to secrets, and is resolved where it is
    used: also inside of a task.
    """

    name: str
    path: str
    schema: Schema
    storage: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """DefiniteError if the table cannot be followed."""
        table = self._table()
        if table.metadata().configuration.get(FEED, "false").lower() != "true":
            raise DefiniteError(
                "UPSTREAM_UNREADABLE",
                f"the Delta table of {self.name} has no change data feed",
                hint=f"ALTER TABLE … SET TBLPROPERTIES ({FEED} = true), then create {self.name} again",
            )
        if found := _UNREADABLE & set(table.protocol().reader_features or ()):
            raise DefiniteError(
                "UPSTREAM_UNREADABLE",
                f"the Delta table of {self.name} uses {', '.join(sorted(found))}",
                hint="rewrite it without (REORG TABLE … APPLY (PURGE)), or follow a copy",
            )
        columns = pa.schema(table.schema().to_arrow())
        for column in self.schema.visible:
            if column.name not in columns.names:
                raise DefiniteError(
                    "UPSTREAM_UNREADABLE",
                    f"the Delta table of {self.name} has no column {column.name}",
                    hint=f"it has {', '.join(columns.names)}",
                )

    def latest_epoch(self) -> int:
        return int(self._table().version())

    def epochs(self, after: int, upto: int) -> Sequence[tuple[int, int]]:
        """Every version; how much it changed is only known to its files, so each counts as one."""
        return [(version, 1) for version in range(after + 1, upto + 1)]

    def snapshot(self, epoch: int) -> int:
        """The number of files of a version; a task reads some of them by their position."""
        with explained(self.name):
            return len(list(self._table(epoch).to_pyarrow_dataset().get_fragments()))

    def change_log(self, after: int, upto: int) -> tuple[int, int]:
        """The versions to read, first and last; DefiniteError if the log does not reach back."""
        with explained(self.name):
            self._table(after + 1)
        return after + 1, upto

    def hold(self, epoch: int) -> None:
        """A Delta table cannot be held."""

    def _table(self, version: int | None = None) -> DeltaTable:
        with explained(self.name, versioned=version is not None):
            return self.open(version)

    def open(self, version: int | None = None) -> DeltaTable:
        """The table, with errors as the library has them."""
        storage = {n: reveal(v) if is_reference(v) else v for n, v in self.storage.items()}
        return DeltaTable(self.path, version=version, storage_options=storage)


@contextmanager
def explained(name: str, *, versioned: bool = True) -> Iterator[None]:
    """Errors of `deltalake` as ours. Its own text is not passed on: it may quote a URL with its credentials."""
    try:
        yield
    except HeadwaterError:
        raise
    except TableNotFoundError:
        raise DefiniteError(
            "UPSTREAM_DROPPED",
            f"the Delta table of {name} is gone",
            hint=f"DROP TABLE {name}, or put the table back and RECOVER",
        ) from None
    except Exception as error:  # a broken read of the feed is no DeltaError, and none of Arrow's either
        text = str(error)
        if "change data enabled" in text:
            raise DefiniteError(
                "UPSTREAM_UNREADABLE",
                f"the change data feed of {name} was off for a while",
                hint=f"DROP TABLE {name} and create it again: it is copied again",
            ) from None
        if versioned and any(word in text for word in _LOST):
            raise DefiniteError(
                "UPSTREAM_EXPIRED",
                f"the Delta table of {name} was vacuumed: versions that were not read are gone",
                hint=f"DROP TABLE {name} and create it again: it is copied again",
            ) from None
        raise TransientError("UPSTREAM_BUSY", f"the Delta table of {name} cannot be read now") from None


@dataclass(frozen=True, slots=True)
class CopyFiles:
    """Some files of one version (every `step`-th from `first` on) as a base segment."""

    data_dir: DataDir
    table_id: int
    upstream: DeltaUpstream
    version: int
    first: int
    step: int
    vnode_count: int

    @property
    def subject(self) -> int:
        return self.table_id

    def run(self) -> Iterator[dict[str, Any]]:
        upstream = self.upstream
        with explained(upstream.name):
            table = upstream.open(self.version)
            whole = table.to_pyarrow_dataset()
            mine = list(whole.get_fragments())[self.first :: self.step]
            part = ds.FileSystemDataset(mine, whole.schema, whole.format, whole.filesystem)
            rows = part.to_table(columns=[c.name for c in upstream.schema.visible])
        size = rows.num_rows
        rows = _cast(rows, upstream.schema, upstream.name)
        rows = rows.append_column(OP, pa.array(np.full(size, OP_UPSERT, np.int8)))
        rows = rows.append_column(SEQ, pa.array(np.zeros(size, np.int64)))
        if size:
            yield _written(self, rows, "base")


@dataclass(frozen=True, slots=True)
class TakeChanges:
    """The versions from `first` to `last` as one delta segment, one net change per key."""

    data_dir: DataDir
    table_id: int
    upstream: DeltaUpstream
    first: int
    last: int
    seq_base: int
    vnode_count: int

    @property
    def subject(self) -> int:
        return self.table_id

    def run(self) -> Iterator[dict[str, Any]]:
        upstream = self.upstream
        with explained(upstream.name):
            table = upstream.open()
            feed = table.load_cdf(starting_version=self.first, ending_version=self.last)
            rows = pa.table(feed.read_all())
        if rows.num_rows:
            yield _written(self, self._net(rows), "delta")

    def _net(self, rows: pa.Table) -> pa.Table:
        schema = self.upstream.schema
        kinds = pc.cast(rows.column("_change_type"), pa.string())  # it comes as a view, which few functions take
        upsert = pc.is_in(kinds, value_set=pa.array(["insert", "update_postimage"]))
        rank = pc.add(pc.multiply(rows.column("_commit_version"), 2), pc.cast(upsert, pa.int64()))
        op = pc.if_else(upsert, pa.scalar(OP_UPSERT, pa.int8()), pa.scalar(OP_DELETE, pa.int8()))
        plain = _cast(rows.select([c.name for c in schema.visible]), schema, self.upstream.name)
        net = newest_per_key(plain.append_column(OP, op).append_column(SEQ, rank), schema.key)
        numbers = pa.array(self.seq_base + np.arange(net.num_rows, dtype=np.int64))
        return net.set_column(net.schema.get_field_index(SEQ), SEQ, numbers)


def _cast(rows: pa.Table, schema: Schema, name: str) -> pa.Table:
    fields = pa.schema([pa.field(c.name, arrow_type(c.type)) for c in schema.visible])
    try:
        return pa.table(rows).cast(fields)
    except (pa.ArrowException, ValueError) as error:
        raise DefiniteError(
            "UPSTREAM_UNREADABLE",
            f"a column of the Delta table of {name} does not fit its declared type",
            detail=type(error).__name__,
            hint="declare the type that the Delta table has",
        ) from error


def _written(task: CopyFiles | TakeChanges, rows: pa.Table, kind: str) -> dict[str, Any]:
    segment = write_segment(
        task.data_dir, task.table_id, task.upstream.schema, rows, kind=kind, vnode_count=task.vnode_count
    )
    return {"subject": task.table_id, "segment": segment.as_dict()}
