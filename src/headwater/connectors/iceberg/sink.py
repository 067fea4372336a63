"""The Iceberg sink: Spark writes the files (`sink/lake.py`), `pyiceberg` commits their list. No JVM package.

Exactly once: the files, a snapshot with the properties `headwater.sink` and `headwater.epoch`, and the table properties
`headwater.<sink>.epoch` and `.generation` are one metadata commit. The table properties are the ones that are asked:
they outlive the expiry of snapshots. Every commit, `claim` too, adds a snapshot, because a catalog checks only that
against a stale handle; and `commit.retry.num-retries=0` keeps pyiceberg from repeating a refused commit on its own: it
is judged again here instead.

Old snapshots of the sink expire (`tidy.py`).

pyiceberg writes no equality deletes, so an upsert rewrites the files that it touches. The target must be unpartitioned,
without delete files and without renamed columns: Spark reads its files as plain Parquet, by name.
"""

from __future__ import annotations

import contextlib
import logging
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, GreaterThanOrEqual, LessThanOrEqual
from pyiceberg.io.pyarrow import parquet_files_to_data_files, schema_to_pyarrow
from pyiceberg.table import Table, Transaction

from headwater.connectors.iceberg.tidy import MERGING, superfluous, tidy
from headwater.errors import HeadwaterError, IndeterminateError, TransientError
from headwater.model.schema import Column
from headwater.model.types import arrow_type
from headwater.sink.lake import Bounds, LakeSink, LiveFile
from headwater.sink.options import Option, SinkOptions
from headwater.sink.sink import Progress

log = logging.getLogger(__name__)
OPTIONS: Final = (
    Option("database.name", required=True),
    Option("table.name", required=True),
    Option("create_table_if_not_exists", bool, default=True),
    Option("snapshots.keep", int, default=50),  # of this sink; 0: all of them, for ever
)
PROPERTY_PREFIX: Final = "catalog."
_NEVER: Final = "-1"
_PLAIN: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_NARROW: Final = (pa.int8(), pa.int16())
_TABLE_PROPERTIES: Final = {
    "commit.retry.num-retries": "0",
    # Each commit writes a metadata file; without these they and the cost of a commit grow for ever.
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    **MERGING,
}


class IcebergSink(LakeSink):
    """Appends to or merges into one Iceberg table of a catalog that pyiceberg can load."""

    def __init__(
        self, name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int
    ) -> None:
        super().__init__(name, options, columns, key, generation)
        self.identifier = (options.text("database.name"), options.text("table.name"))
        self.widened = frozenset(c.name for c in self.columns if arrow_type(c.type) in _NARROW)
        self._loaded: Catalog | None = None

    def location(self, table: Table) -> str:
        return str(table.location())

    def load(self) -> Table:
        try:
            return self._catalog().load_table(self.identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            message = f"the table of sink {self.name} does not exist"
            raise TransientError("SINK_TARGET_MISSING", message) from None
        except HeadwaterError:
            raise
        except Exception as error:
            message = f"the catalog of sink {self.name} cannot be used now"
            raise TransientError("SINK_UNREACHABLE", message, detail=type(error).__name__) from None

    def _catalog(self) -> Catalog:
        if self._loaded is None:
            properties = self.options.reveal_properties()
            # The name counts: a SQL catalog keeps the tables of each name apart.
            self._loaded = load_catalog(properties.pop("name", "default"), **properties)
        return self._loaded

    def create(self) -> None:
        # All optional: Spark's writer marks every column so, and a required one would refuse its files.
        kinds = [(c.name, arrow_type(c.type)) for c in self.columns]
        fields = [pa.field(n, pa.int32() if kind in _NARROW else kind) for n, kind in kinds]
        with contextlib.suppress(NamespaceAlreadyExistsError):
            self._catalog().create_namespace(self.identifier[0])
        with contextlib.suppress(TableAlreadyExistsError):
            self._catalog().create_table(
                self.identifier, pa.schema(fields), location=self._own_location(), properties=dict(_TABLE_PROPERTIES)
            )

    def _own_location(self) -> str | None:
        """Where the table goes if its name is not fit for a URL; others are put where the catalog puts tables."""
        warehouse = self.options.reveal_properties().get("warehouse", "")
        if "/" not in warehouse or all(_PLAIN.fullmatch(part) for part in self.identifier):
            return None
        return "/".join([warehouse.rstrip("/"), *(_spelt(part) for part in self.identifier)])

    def check(self, table: Table) -> dict[str, pa.DataType]:
        if not table.spec().is_unpartitioned():
            raise self.target_changed("is partitioned", hint="use an unpartitioned table")
        names = {f.field_id: f.name for f in table.schema().fields}
        for schema in table.schemas().values():
            if any(names.get(f.field_id, f.name) != f.name for f in schema.fields):
                raise self.target_changed("has renamed columns", hint="use a new table")
        return {f.name: f.type for f in schema_to_pyarrow(table.schema(), include_field_ids=False)}

    def progress(self, table: Table) -> Progress | None:
        generation = table.properties.get(f"headwater.{self.name}.generation")
        epoch = table.properties.get(f"headwater.{self.name}.epoch")
        if generation is None:
            return None
        return Progress(None if epoch in (None, _NEVER) else int(epoch), int(generation))

    def files(self, table: Table, bounds: Mapping[str, Bounds]) -> list[LiveFile]:
        wanted: BooleanExpression = AlwaysTrue()
        for name, bound in bounds.items():
            if not bound.has_null and bound.low is not None:
                wanted = And(wanted, GreaterThanOrEqual(name, bound.low), LessThanOrEqual(name, bound.high))
        tasks = list(table.scan(row_filter=wanted).plan_files())
        if self.upsert and any(task.delete_files for task in tasks):
            raise self.target_changed("has delete files", hint="rewrite its data files, or use a new table")
        return [LiveFile(t.file.file_path, int(t.file.file_size_in_bytes), t.file) for t in tasks]

    def try_commit(self, table: Table, epoch: int | None, added: Sequence[str], removed: Sequence[LiveFile]) -> bool:
        marks = self._marks()
        if epoch is not None:
            marks[f"headwater.{self.name}.epoch"] = str(epoch)
        summary = {"headwater.sink": self.name, "headwater.epoch": "" if epoch is None else str(epoch)}
        try:
            transaction = Transaction(table, autocommit=False)
            self._name_mapping(transaction, marks)
            update = transaction.update_snapshot(snapshot_properties=summary)
            with update.overwrite() if removed else update.merge_append() as snapshot:
                for old in removed:
                    snapshot.delete_data_file(old.handle)
                for url in added:
                    snapshot.append_data_file(self._data_file(table, transaction.table_metadata, url))
            transaction.commit_transaction()
        except CommitFailedException:
            return False
        except Exception as error:
            message = f"a commit of sink {self.name} failed"
            raise IndeterminateError("SINK_COMMIT_UNKNOWN", message, detail=type(error).__name__) from None
        return True

    def _data_file(self, table: Table, metadata: Any, url: str) -> Any:
        try:
            return next(iter(parquet_files_to_data_files(table.io, metadata, iter([url]))))
        except OverflowError:
            # A bound that Python has no date for: infinity, or a time before our era. Without bounds the file may
            # hold anything, which is true.
            times = [f.name for f in table.schema().as_arrow() if pa.types.is_temporal(f.type)]
            counted = {f"write.metadata.metrics.column.{name}": "counts" for name in times}
            plain = metadata.model_copy(update={"properties": {**metadata.properties, **counted}})
            return next(iter(parquet_files_to_data_files(table.io, plain, iter([url]))))

    def _marks(self) -> dict[str, str]:
        return {f"headwater.{self.name}.generation": str(self.generation), "commit.retry.num-retries": "0"}

    def tidy(self) -> None:
        keep = int(self.options["snapshots.keep"])
        if keep <= 0:
            return
        try:
            table = self.load()
            old = superfluous(table, self.name, keep)
            stored = self.progress(table)
            if old and stored is not None and stored.generation == self.generation:
                tidy(table, self.name, self._marks(), old, f"{table.location()}/headwater-expired-{self._digest}")
        except Exception as error:
            # The batch is there; this is tried again after a later one.
            log.warning("the target of sink %s could not be tidied: %s", self.name, type(error).__name__)

    def _name_mapping(self, transaction: Transaction, marks: dict[str, Any]) -> None:
        """Files of Spark's plain writer have no field ids: the table's name mapping gives them."""
        metadata = transaction.table_metadata
        if metadata.name_mapping() is None:
            marks = {**marks, "schema.name-mapping.default": metadata.schema().name_mapping.model_dump_json()}
        transaction.set_properties(marks)


def _spelt(name: str) -> str:
    """A name as a part of a URL that nobody reads back: other signs than letters, digits, `_` and `-` as `~2f`."""
    kept = "-_" + string.ascii_letters + string.digits
    return "".join(chr(b) if chr(b) in kept else f"~{b:02x}" for b in name.encode())
