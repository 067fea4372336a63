"""The Delta sink: Spark writes the files (`sink/lake.py`), `deltalake` commits their list. No JVM package.

Exactly once by the protocol's own `txn` action: application `<sink>` has the epoch as its version, `<sink>/generation`
the owner. Both are part of every commit, so a commit from a handle that has not seen another writer's conflicts with it
and is refused; then everything is read again and judged again. Each added file carries its row count and the bounds of
its key columns, by which later batches, and readers, skip it. The target must be unpartitioned, and without deletion
vectors or mapped columns: Spark reads and writes its files as plain Parquet here.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError, TransientError
from headwater.model.schema import Column
from headwater.model.types import arrow_type
from headwater.sink.lake import Bounds, LakeSink, LiveFile, filesystem_of
from headwater.sink.names import name_refused
from headwater.sink.options import Option, SinkOptions
from headwater.sink.sink import Progress

OPTIONS: Final = (
    Option("path", required=True),
    Option("create_table_if_not_exists", bool, default=True),
)
PROPERTY_PREFIX: Final = "storage."
_NEVER: Final = -1  # the version of a sink that was set back to nothing
_NOT_IN_NAMES: Final = frozenset(" ,;{}()\n\t=")  # Spark and others refuse to read a table that has them
_UNREADABLE: Final = ("deletionVectors", "columnMapping")


class DeltaSink(LakeSink):
    """Appends to or merges into one Delta table."""

    def __init__(
        self, name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int
    ) -> None:
        super().__init__(name, options, columns, key, generation)
        self.path = options.text("path").rstrip("/")

    def location(self, table: DeltaTable) -> str:
        return self.path

    def load(self) -> DeltaTable:
        try:
            return DeltaTable(self.path, storage_options=self.options.reveal_properties() or None)
        except TableNotFoundError:
            raise TransientError(
                "SINK_TARGET_MISSING",
                f"there is no Delta table at the path of sink {self.name}",
                hint="add create_table_if_not_exists='true', or create it",
            ) from None
        except (DeltaError, OSError) as error:
            message = f"the target of sink {self.name} cannot be used now"
            raise TransientError("SINK_UNREACHABLE", message, detail=type(error).__name__) from None

    def validate(self, columns: Sequence[Column], key: Sequence[str]) -> None:
        if "\\" in self.path:  # the file systems of Spark take it for a slash
            raise name_refused("path", self.path, "it holds a backslash", hint="choose another path")
        for name in self.column_names:
            if found := _NOT_IN_NAMES & set(name):
                why = f"without column mapping a name cannot hold {', '.join(map(repr, sorted(found)))}"
                raise name_refused("column", name, why)
        super().validate(columns, key)

    def create(self) -> None:
        schema = pa.schema([pa.field(c.name, arrow_type(c.type), c.nullable) for c in self.columns])
        try:
            storage = self.options.reveal_properties() or None
            DeltaTable.create(self.path, schema, mode="ignore", storage_options=storage)
        except (DeltaError, OSError, ValueError) as error:
            message = f"the table of sink {self.name} cannot be created"
            raise DefiniteError("SINK_TARGET_MISSING", message, detail=type(error).__name__) from None

    def check(self, table: DeltaTable) -> dict[str, pa.DataType]:
        if table.metadata().partition_columns:
            raise self.target_changed("is partitioned", hint="use an unpartitioned table")
        features = table.protocol().reader_features or []
        if found := [f for f in _UNREADABLE if f in features]:
            raise self.target_changed(f"has the feature {found[0]}", hint="use a table without it")
        return {f.name: f.type for f in pa.schema(table.schema().to_arrow())}

    def progress(self, table: DeltaTable) -> Progress | None:
        generation = table.transaction_version(f"{self.name}/generation")
        epoch = table.transaction_version(self.name)
        if generation is None and epoch is None:
            return None
        return Progress(None if epoch in (None, _NEVER) else epoch, -1 if generation is None else generation)

    def files(self, table: DeltaTable, bounds: Mapping[str, Bounds]) -> list[LiveFile]:
        actions = pa.table(table.get_add_actions(flatten=True))
        keep = pa.repeat(True, actions.num_rows)
        for name, bound in bounds.items():
            if f"min.{name}" not in actions.column_names or bound.has_null:
                continue
            low, high = (actions[f"{side}.{name}"].combine_chunks() for side in ("min", "max"))
            inside = pc.and_(
                pc.less_equal(low, pa.scalar(bound.high, low.type)),
                pc.greater_equal(high, pa.scalar(bound.low, high.type)),
            )
            keep = pc.and_(keep, pc.fill_null(inside, True))  # a file without statistics may hold anything
        chosen = actions.filter(keep).select(["path", "size_bytes"]).to_pylist()
        return [LiveFile(f"{self.path}/{a['path']}", int(a["size_bytes"]), a["path"]) for a in chosen]

    def try_commit(
        self, table: DeltaTable, epoch: int | None, added: Sequence[str], removed: Sequence[LiveFile]
    ) -> bool:
        now = int(time.time() * 1000)
        actions = [self._add_action(url, now) for url in added]
        actions += [RemoveAction(f.handle, True, now, f.bytes) for f in removed]
        with self._conflicts() as outcome:
            table.create_write_transaction(actions, "append", table.schema(), commit_properties=self._properties(epoch))
            outcome.append(True)
        return bool(outcome)

    def _properties(self, epoch: int | None) -> CommitProperties:
        """The owner and, unless None, the progress. A refused commit is judged again, never just repeated."""
        transactions = [Transaction(f"{self.name}/generation", self.generation)]
        if epoch is not None:
            transactions.append(Transaction(self.name, epoch))
        metadata = {"headwaterSink": self.name}
        return CommitProperties(custom_metadata=metadata, max_commit_retries=0, app_transactions=transactions)

    @contextlib.contextmanager
    def _conflicts(self) -> Iterator[list[bool]]:
        """A list that stays empty where another writer was first; an error where the outcome is not known."""
        outcome: list[bool] = []
        try:
            yield outcome
        except CommitFailedError:
            return
        except HeadwaterError:
            raise
        except Exception as error:
            raise IndeterminateError(
                "SINK_COMMIT_UNKNOWN", f"a commit of sink {self.name} failed", detail=type(error).__name__
            ) from None

    def _add_action(self, url: str, now: int) -> AddAction:
        filesystem, path = filesystem_of(url)
        with filesystem.open_input_file(path) as file:
            metadata = pq.read_metadata(file)
            size = file.size()
        stats = {"numRecords": metadata.num_rows, **_statistics(metadata, self._prunable())}
        return AddAction(url[len(self.path) + 1 :], size, {}, now, True, json.dumps(stats))


def _statistics(metadata: Any, columns: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Bounds and null counts of some columns, where every row group has them."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for i in range(metadata.num_columns):
        name = metadata.schema.column(i).path
        if name not in columns or name != metadata.schema.column(i).name:  # a field of a struct, `a.b`, is not `a.b`
            continue
        found = [metadata.row_group(g).column(i).statistics for g in range(metadata.num_row_groups)]
        if not found or not all(s is not None and s.has_min_max and s.has_null_count for s in found):
            continue
        try:
            least[name], greatest[name] = _plain(min(s.min for s in found)), _plain(max(s.max for s in found))
        except OverflowError:  # a date that Python has not: the file goes without bounds
            continue
        nulls[name] = sum(s.null_count for s in found)
    return {"minValues": least, "maxValues": greatest, "nullCount": nulls}


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, dt.date) else value
