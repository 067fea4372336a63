"""The Spark jobs of sinks into table formats: staging a batch, finding the files that it touches, rewriting them.

Rows stay with Spark's native reader and writer; the driver sees counts, bounds and file names. `sink/lake.py` says what
the files are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from pyarrow import fs
from pyspark.sql import DataFrame, DataFrameReader, DataFrameWriter, Observation, SparkSession
from pyspark.sql import functions as F

from headwater.model.schema import OP, OP_UPSERT, quoted
from headwater.sink.lake import Bounds, filesystem_of, plain

_PYTHON_DATES: Final = ("0001-01-01", "9999-12-31")
_STAGED_OP: Final = "op"  # the directories `op=1` and `op=2`; a name without underscore, so that VACUUM sees them


@dataclass(frozen=True, slots=True)
class Staged:
    """How many rows a batch has, and the bounds of its keys."""

    rows: int
    bounds: dict[str, Bounds]


def stage(
    df: DataFrame, path: str, *, columns: Sequence[str], widen: frozenset[str], prune: Sequence[str], by_op: bool
) -> Staged:
    """Write a batch under `path`: upserts to `op=1`, with `by_op` deletes to `op=2`; one job, counted by itself."""
    # Not the default of every Spark version, and the only spelling that all readers of open table formats agree on.
    df.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    seen = Observation()
    measures = [F.count(F.lit(1)).alias("rows")]
    for i, name in enumerate(prune if by_op else ()):
        column = F.col(quoted(name))
        if dict(df.dtypes)[name] == "date":
            first, last = (F.lit(day).cast("date") for day in _PYTHON_DATES)
            column = F.when(column.between(first, last), column)  # others count as NULL: they prune nothing
        measures += [F.min(column).alias(f"low{i}"), F.max(column).alias(f"high{i}")]
        measures.append(F.count(F.when(column.isNull(), 1)).alias(f"nulls{i}"))
    if not by_op:
        # Into an empty or an append-only table a delete has no effect.
        df = df.where(F.col(OP) == OP_UPSERT)
    counted = df.observe(seen, *measures)
    chosen = [F.col(quoted(c)).cast("int").alias(c) if c in widen else F.col(quoted(c)) for c in columns]
    if by_op:
        name = _free_name(columns)
        _writer(counted.select(*chosen, F.col(OP).alias(name))).partitionBy(name).parquet(path)
        _rename_partitions(path, name)
    else:
        _writer(counted.select(*chosen)).parquet(f"{path}/{_STAGED_OP}={OP_UPSERT}")
    got = seen.get
    bounds = {
        name: Bounds(got[f"low{i}"], got[f"high{i}"], bool(got[f"nulls{i}"]))
        for i, name in enumerate(prune if by_op else ())
    }
    return Staged(int(got["rows"]), bounds)


def _free_name(columns: Sequence[str]) -> str:
    name = _STAGED_OP
    while name.lower() in {c.lower() for c in columns}:
        name += "_"
    return name


def _rename_partitions(path: str, name: str) -> None:
    """A column of the user's may be called like our directories; the directories keep their names all the same."""
    if name == _STAGED_OP:
        return
    filesystem, root = filesystem_of(path)
    for info in filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True)):
        if info.base_name.startswith(f"{name}="):
            filesystem.move(info.path, f"{root}/{_STAGED_OP}={info.base_name.split('=')[1]}")


@dataclass(frozen=True, slots=True)
class OldFiles:
    """The table's files beside a staged batch. `columns` None: the table has columns of its own; take what is there."""

    spark: SparkSession
    columns: Sequence[tuple[str, str]] | None
    key: Sequence[str]
    directory: str

    def touched(self, urls: Sequence[str]) -> list[str]:
        """Those of the files that hold a key of the batch, as plain names. Reads the key columns alone."""
        if not urls:
            return []
        rows = self._read(urls)
        file = rows.metadataColumn("_metadata").getField("file_path")  # a column of the table may have the name
        rows = rows.select(*[F.col(quoted(k)) for k in self.key], file.alias("_hw_file"))
        found = self._joined(rows, "left_semi").select("_hw_file").distinct().collect()
        return [plain(row["_hw_file"]) for row in found]

    def rewrite(self, urls: Sequence[str]) -> None:
        """What the batch leaves of these files, as new files."""
        _writer(self._joined(self._read(urls), "left_anti")).parquet(f"{self.directory}/kept")

    def _joined(self, rows: DataFrame, how: str) -> DataFrame:
        keys = self._batch_keys()
        same = [rows[quoted(k)].eqNullSafe(keys[f"`_hw_key{i}`"]) for i, k in enumerate(self.key)]
        return rows.join(keys, reduce(lambda a, b: a & b, same), how)

    def _batch_keys(self) -> DataFrame:
        """The keys of all changes of the batch, whichever of the two directories there are."""
        filesystem, root = filesystem_of(self.directory)
        found = [i.base_name for i in filesystem.get_file_info(fs.FileSelector(root)) if i.base_name.startswith("op=")]
        rows = _reader(self.spark).parquet(*[f"{self.directory}/{name}" for name in found])
        return rows.select(*[F.col(quoted(k)).alias(f"_hw_key{i}") for i, k in enumerate(self.key)])

    def _read(self, urls: Sequence[str]) -> Any:
        if self.columns is None:
            return _reader(self.spark).option("mergeSchema", "true").parquet(*urls)
        ddl = ", ".join(f"{quoted(name)} {kind}" for name, kind in self.columns)
        return _reader(self.spark).schema(ddl).parquet(*urls)


def _writer(rows: DataFrame) -> DataFrameWriter:
    """Without the empty file `_SUCCESS`: what counts is what the table names."""
    return rows.write.mode("error").option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")


def _reader(spark: SparkSession) -> DataFrameReader:
    """Paths are names of files, never patterns: `{}`, `[]`, `*` and `?` in them mean themselves."""
    return spark.read.option("__globPaths__", "false")
