"""The files sink: Parquet or JSON lines under one directory, published by a manifest log (`manifest.py`).

Spark tasks write into a directory of the attempt; the commit links one manifest record that names the files. An
append-only sink's files hold the columns, an upsert sink's also `_op` (1 upsert, 2 delete): a reader applies the
records in order. `read_table` does so. The directory must be a local or shared POSIX file system: the commit needs an
exclusive `link`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from headwater.connectors.files.manifest import DATA_DIR, ManifestLog, Record, Staging, batches
from headwater.errors import DefiniteError, IndeterminateError, TransientError, UsageError
from headwater.model.schema import OP, OP_UPSERT, Column
from headwater.sink.base import BaseSink
from headwater.sink.options import Option, SinkOptions
from headwater.sink.sink import Progress, Token, Verdict, fenced, judge_progress
from headwater.storage.files import path_part

OPTIONS: Final = (
    Option("path", required=True),
    Option("format", default="parquet", choices=("parquet", "json")),
    Option("compression", default="zstd", choices=("zstd", "snappy", "gzip", "none")),
)
_RACES: Final = 100  # tries to place a record; each lost one means that another writer placed one


class FilesSink(BaseSink):
    """Appends change files and one manifest record per batch."""

    takes_rows = True

    def __init__(
        self, name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int
    ) -> None:
        super().__init__(name, options, columns, key, generation)
        self.path = _local_path(options.text("path"))
        self._log = ManifestLog(self.path)
        self._part = path_part(name)
        self._staging = Staging(self.path, name)

    def validate(self, columns: Sequence[Column], key: Sequence[str]) -> None:
        try:
            (self.path / DATA_DIR).mkdir(parents=True, exist_ok=True)
            earlier = self._log.state(self.name)
        except OSError as error:
            raise DefiniteError(
                "SINK_PATH_UNUSABLE", "the sink's directory cannot be used", detail=_reason(error)
            ) from None
        written = earlier is not None and bool(earlier.type)
        if earlier and written and (earlier.type, earlier.key) != (self.options.type.value, self.key):
            raise self.target_changed("was written with another type or key", hint="choose another path")

    def claim(self) -> None:
        for _ in range(_RACES):
            stored = self._progress()
            if stored is not None and stored.generation > self.generation:
                raise fenced(self.name)
            if stored is not None and stored.generation == self.generation:
                return
            if self._append(Record("claim", self.name, self.generation)):
                return
        raise TransientError("SINK_BUSY", f"too many writers at the target of sink {self.name}")

    def prepare(self, from_epoch: int, to_epoch: int) -> Token:
        stored = self._progress()
        if stored is not None and stored.generation > self.generation:
            raise fenced(self.name)
        if not self._staging.known:
            self._remove_stale()
        self._staging.sweep(self._log, self.generation)
        token = self.token(from_epoch, to_epoch)
        return token.written(rows=0, directory=f"{DATA_DIR}/{self._part}-{to_epoch}-{self.generation}-{token.attempt}")

    def write(self, token: Token, batch: Any) -> Token:
        from headwater.spark.sink import run_tasks

        directory = self.path / token.payload["directory"]
        self._staging.begin(token.attempt, token.payload["directory"], self.generation, self._log.next)
        directory.mkdir(parents=True)
        fmt, compression = self.options.text("format"), self.options.text("compression")
        names = [*self.column_names, OP] if self.upsert else list(self.column_names)

        def task(arrow: Iterator[Any], info: Any) -> dict[str, Any]:
            stem = directory / f"part-{info.partition:05d}-{info.attempt}"
            return write_file(arrow, stem, names, fmt, compression)

        results = [r for r in run_tasks(batch, task) if r["rows"]]
        prefix = token.payload["directory"]
        files = [{"path": f"{prefix}/{r['file']}", "rows": r["rows"], "bytes": r["bytes"]} for r in results]
        return token.written(rows=self.rows_of(results), bytes=sum(f["bytes"] for f in files), files=files)

    def commit(self, token: Token) -> None:
        record = Record(
            "batch",
            self.name,
            token.generation,
            token.from_epoch,
            token.to_epoch,
            self.options.type.value,
            self.key,
            tuple(token.payload["files"]),
        )
        for _ in range(_RACES):
            if judge_progress(self._progress(), token) is Verdict.ALREADY:
                self._staging.settle(token.attempt, self._log, self.generation)
                return
            if self._append(record):
                self._tidy(token)
                return
        raise TransientError("SINK_BUSY", f"too many writers at the target of sink {self.name}")

    def last_committed(self) -> int | None:
        stored = self._progress()
        return stored.epoch if stored is not None else None

    def reset(self, to_epoch: int | None) -> None:
        for _ in range(_RACES):
            stored = self._progress()
            if stored is not None and stored.generation > self.generation:
                raise fenced(self.name)
            if self._append(Record("reset", self.name, self.generation, to_epoch=to_epoch)):
                return

    def abort(self, token: Token) -> None:
        if directory := token.payload.get("directory"):
            shutil.rmtree(self.path / directory, ignore_errors=True)
            self._staging.end(token.attempt)

    def _tidy(self, token: Token) -> None:
        """The attempt is published: what its repeated tasks left beside its files goes, and so does an empty folder."""
        directory = self.path / token.payload["directory"]
        named = {Path(f["path"]).name for f in token.payload["files"]}
        with contextlib.suppress(OSError):
            for file in directory.iterdir():
                if file.name not in named:
                    file.unlink()
            if not named:
                directory.rmdir()
        self._staging.end(token.attempt)

    def _progress(self) -> Progress | None:
        """The last state of this sink in the log."""
        state = self._log.state(self.name)
        return Progress(state.epoch, state.generation) if state is not None else None

    def _append(self, record: Record) -> bool:
        try:
            return self._log.append(record)
        except OSError as error:
            # The link may have been made before the failure (a network file system, a failing sync).
            raise IndeterminateError(
                "SINK_COMMIT_UNKNOWN", "the manifest could not be written", detail=_reason(error)
            ) from None

    def _remove_stale(self) -> None:
        """Staging of attempts that no record names, looked for among all of them: once, where an older release, which
        left no notes of its attempts, may have written. Only the owner calls this, with no attempt under way.
        """
        kept = {f["path"].rsplit("/", 1)[0] for r in batches(self._log.records()) for f in r.files}
        for directory in (self.path / DATA_DIR).iterdir():
            # What a newer engine stages is not ours to remove, whatever we believed when we looked for it.
            name, *facts = directory.name.rsplit("-", 3)
            ours = len(facts) == 3 and name == self._part and facts[1].isdecimal() and int(facts[1]) <= self.generation
            if ours and f"{DATA_DIR}/{directory.name}" not in kept:
                shutil.rmtree(directory, ignore_errors=True)


def write_file(batches: Iterator[Any], stem: Path, names: list[str], fmt: str, compression: str) -> dict[str, Any]:
    """Write one task's batches to one file, synced; nothing for a task without rows."""
    rows = 0
    writer: Any = None
    final = stem.with_name(f"{stem.name}.{'parquet' if fmt == 'parquet' else 'jsonl'}")
    for batch in batches:
        if batch.num_rows == 0:
            continue
        chosen = batch.select(names)
        if writer is None:
            writer = _open(final, chosen.schema, fmt, compression)
        writer.write(chosen)
        rows += batch.num_rows
    if writer is None:
        return {"rows": 0, "file": "", "bytes": 0}
    writer.close()
    with final.open("rb") as file:
        os.fsync(file.fileno())
    return {"rows": rows, "file": final.name, "bytes": final.stat().st_size}


def _open(final: Path, schema: Any, fmt: str, compression: str) -> Any:
    import pyarrow.parquet as pq

    if fmt == "parquet":
        return pq.ParquetWriter(final, schema, compression=compression)
    return _JsonLines(final)


class _JsonLines:
    """Writes record batches as JSON lines, encoded column-wise."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, batch: Any) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        from headwater.sink.encode import json_rows

        lines = pc.binary_join_element_wise(json_rows(batch), "\n", "").cast(pa.large_string())
        offsets, data = lines.buffers()[1], lines.buffers()[2]
        end = int.from_bytes(offsets[8 * len(lines) : 8 * len(lines) + 8].to_pybytes(), "little")
        self._file.write(data[:end])

    def close(self) -> None:
        self._file.close()


def read_table(path: str | Path, sink: str | None = None) -> Any:
    """The content of a files sink as an Arrow table: appended rows, or the last row of every key.

    JSON lines hold no types: a column of them has the type that its values look like.
    """
    import pyarrow as pa

    root = _local_path(str(path))
    records = batches(ManifestLog(root).records(), sink)
    tables = []
    for number, record in enumerate(records):
        for file in record.files:
            table = _read_file(root / file["path"])
            tables.append(table.append_column("_hw_batch", pa.array([number] * len(table), pa.int64())))
    if not tables:
        return pa.table({})
    # Batches differ in which columns may be NULL (Spark knows that `_op` of a snapshot is not), and in added columns.
    everything = pa.concat_tables(tables, promote_options="permissive")
    if records[-1].type != "upsert":
        return everything.drop_columns(["_hw_batch"])
    return _last_per_key(everything, list(records[-1].key))


def _read_file(path: Path) -> Any:
    import pyarrow.json as pj
    import pyarrow.parquet as pq

    return pq.read_table(path) if path.suffix == ".parquet" else pj.read_json(path)


def _last_per_key(table: Any, key: list[str]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    table = table.append_column("_hw_row", pa.array(range(len(table)), pa.int64()))
    ordered = table.sort_by([("_hw_batch", "ascending")])
    ordered = ordered.set_column(
        ordered.schema.get_field_index("_hw_row"), "_hw_row", pa.array(range(len(ordered)), pa.int64())
    )
    last = ordered.group_by(key, use_threads=False).aggregate([("_hw_row", "max")])["_hw_row_max"]
    kept = ordered.take(last)
    live = kept.filter(pc.equal(kept[OP], OP_UPSERT))
    return live.drop_columns(["_hw_batch", "_hw_row", OP])


def _local_path(text: str) -> Path:
    if text.startswith("file://"):
        text = text[len("file://") :]
    if "://" in text:
        raise UsageError(
            "SINK_PATH_UNUSABLE",
            "the files sink needs a local or shared file system",
            hint="for an object store use connector='delta' or connector='iceberg'",
        )
    return Path(text).absolute()


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else type(error).__name__
