"""The task that reads splits of a Postgres table into staged segments: rows → Arrow → Parquet in the worker."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headwater.backfill.cdc.notes import Notes
from headwater.backfill.cdc.state import ReadPaused
from headwater.capture.splits import WHOLE, Page, Split
from headwater.connectors.postgres.catalogue import TableInfo
from headwater.connectors.postgres.client import PostgresConfig
from headwater.connectors.postgres.types import ColumnPlan
from headwater.errors import TransientError
from headwater.model.schema import ROW_NO, Schema
from headwater.spark.multiset import copied_numbers
from headwater.storage.files import DataDir
from headwater.storage.segments import write_segment

if TYPE_CHECKING:
    from headwater.connectors.postgres.planner import ReadMark

LOOK_S: Final = 0.25  # how often a limited read looks whether its limit has changed
# A read that is stopped this long gives up, and is made again later: its slot is for others, its snapshot would age.
PATIENCE_S: Final = 5.0
LIMITED_BLOCK: Final = 1 << 16  # a limited read takes small blocks, so that it can stop between them
WRITE_BEHIND_BYTES: Final = 128 << 20  # a larger split is written before the next is read: a task's memory is bounded


@dataclass(frozen=True, slots=True)
class Fetched:
    """The rows of a split in the order in which they came, what their read has seen, and where it ended."""

    rows: pa.Table
    mark: ReadMark
    right: str | None
    dense: bool
    """Whether to try the next split page by page."""


@dataclass(frozen=True, slots=True)
class ReadSplit:
    """Reads `split` under one snapshot. Holds a reference to the password, never the password.

    `snapshot` is one that the engine exported, so that several reads see the same; `low` is what it sees, `storage` the
    files that the table had before it (`planner.storage`).
    """

    data_dir: DataDir
    table_id: int
    schema: Schema
    config: PostgresConfig
    table: TableInfo
    plans: tuple[ColumnPlan, ...]
    split: Split
    vnode_count: int
    control: str
    readers: int
    snapshot: str = ""
    low: str = ""
    generation: int = 0
    storage: str = ""
    page: Page = WHOLE
    """How much of the split to read; the result says where that ends (`right`)."""
    by_index: bool = False
    """Not page by page: a small part is not worth it, and a check should not rest on what it checks."""

    @property
    def subject(self) -> int:
        return self.table_id

    def run(self) -> Iterator[dict[str, Any]]:
        yield from ReadInTurn((self,)).run()

    def fetch(self, conn: Any, *, dense: bool = True) -> Fetched:
        """Read the split; `dense`: page by page, if its keys promise that this is worth it (`dense.py`)."""
        from headwater.connectors.postgres.planner import check_storage, page_end, prefer_index, storage

        split = self.split
        before = self.storage or storage(conn, self.table.oid)
        with self._marked(conn) as mark:
            if split.left is not None or split.right is not None or self.page.rows:
                prefer_index(conn)
            if end := page_end(conn, self.table, split, self.page):
                split = dataclasses.replace(split, right=end)
            plain = self.by_index or self.page.rows > 0
            rows, worth_it = self._read(conn, split, dense=dense and not plain)
            check_storage(conn, self.table, before)
        return Fetched(rows, mark, split.right_json, dense and (plain or worth_it))

    def stage(self, found: Fetched, packed: dict[str, Any]) -> dict[str, Any]:
        """Write what was read; what the engine is told of it. `packed` is filled by the first split that has rows."""
        return {
            "subject": self.table_id,
            "split_id": self.split.split_id,
            "low": found.mark.low,
            "high": found.mark.high,
            "rows": found.rows.num_rows,
            "right": found.right,
            "segment": self._write(found.rows, packed),
        }

    @contextmanager
    def _marked(self, conn: Any) -> Iterator[ReadMark]:
        from headwater.connectors.postgres.client import translated
        from headwater.connectors.postgres.planner import ReadMark, current_lsn, marked_read

        if not self.snapshot:
            with marked_read(conn, self.table) as mark:
                yield mark
            return
        mark = ReadMark(self.low)
        with translated("reading a split"):
            conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            self._take_snapshot(conn)
            yield mark
            conn.execute("COMMIT")
            mark.high = current_lsn(conn)

    def _take_snapshot(self, conn: Any) -> None:
        from psycopg import errors as pg_errors

        try:
            conn.execute(f"SET TRANSACTION SNAPSHOT '{self.snapshot}'")
        except (pg_errors.InvalidParameterValue, pg_errors.UndefinedObject, pg_errors.ObjectNotInPrerequisiteState):
            # It ends with the connection that exported it: that one was cut, or the server restarted.
            raise TransientError(
                "SOURCE_SNAPSHOT_LOST", "the shared snapshot of the reads is gone", hint="the table is read again"
            ) from None

    def _read(self, conn: Any, split: Split, *, dense: bool) -> tuple[pa.Table, bool]:
        from headwater.connectors.postgres.rowreader import BLOCK_BYTES
        from headwater.connectors.postgres.splitrows import SplitRows

        pace = Pace(self.data_dir, self.control, self.readers, self.page)
        pace.wait(0)
        block_bytes = LIMITED_BLOCK if pace.limited else BLOCK_BYTES
        by_content = self.schema.multiset
        reader = SplitRows(conn, self.table, self.plans, pace.wait, block_bytes, by_content)
        rows, dense = reader.read(split, dense=dense)
        if by_content and rows.num_rows:
            rows = rows.append_column(ROW_NO, copied_numbers(self.generation, self.split.split_id, rows.num_rows))
        return rows, dense

    def _write(self, rows: pa.Table, packed: dict[str, Any]) -> dict[str, Any] | None:
        if rows.num_rows == 0:
            return None
        segment = write_segment(
            self.data_dir,
            self.table_id,
            self.schema,
            rows,
            kind="base",
            vnode_count=self.vnode_count,
            packed=packed,
        )
        return segment.as_dict()


@dataclass(frozen=True, slots=True)
class ReadInTurn:
    """Reads several splits of a table one after the other, by one connection. While one is written the next is read:
    the server and the worker would otherwise wait for each other.

    With `notes` each result is told at once, no further split is begun after `for_s`, and none that another `reader`
    with the same notes has begun.
    """

    reads: tuple[ReadSplit, ...]
    notes: Notes | None = None
    for_s: float = float("inf")
    reader: int = 0

    @property
    def subject(self) -> int:
        return self.reads[0].subject

    def run(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self._results()
        except TransientError as error:
            # As a result: an exception would come back as one of Spark's, and look definite.
            yield {"subject": self.subject, "transient": True, "error": error.as_dict()}

    def _results(self) -> Iterator[dict[str, Any]]:
        from headwater.connectors.postgres.client import connect

        noted = self.notes.read() if self.notes else {}  # by an earlier try of this task, or by others
        yield from noted.values()
        waiting = [read for read in self.reads if read.split.split_id not in noted]
        until = time.monotonic() + self.for_s
        packed: dict[str, Any] = {}
        writing: list[Future[dict[str, Any]]] = []
        dense = True
        config = self.reads[0].config
        with (
            ThreadPoolExecutor(1, thread_name_prefix="write") as writer,
            connect(config, application="headwater backfill") as conn,
        ):
            try:
                for read in waiting:
                    if writing and time.monotonic() > until:
                        break
                    if self.notes is not None and not self.notes.claim(read.split.split_id, self.reader):
                        continue
                    found = read.fetch(conn, dense=dense)
                    dense = found.dense
                    if writing:
                        yield writing.pop().result()
                    writing.append(writer.submit(self._stage, read, found, packed))
                    large = found.rows.nbytes > WRITE_BEHIND_BYTES
                    del found  # the writer has it; else it would be in memory until the next is read
                    if large:
                        writing[0].exception()  # waits
                if writing:
                    yield writing.pop().result()
            except BaseException:
                self._forget(writing)
                raise

    def _stage(self, read: ReadSplit, found: Fetched, packed: dict[str, Any]) -> dict[str, Any]:
        result = read.stage(found, packed)
        if self.notes is not None:
            self.notes.write(read.split.split_id, result)
        return result

    def _forget(self, writing: list[Future[dict[str, Any]]]) -> None:
        """Files that nobody will hear of."""
        if self.notes is not None:
            return
        for written in writing:
            if written.exception() is None and (segment := written.result()["segment"]) is not None:
                self.reads[0].data_dir.delete([segment["path"]])


class Pace:
    """The rate limit of a table's copy, read from a small file that the engine rewrites when it changes.

    A read that a limit holds up for too long is given up: `page` says what it was begun with.
    """

    def __init__(self, data_dir: DataDir, control: str, readers: int, page: Page = WHOLE) -> None:
        self.data_dir, self.control, self.readers = data_dir, control, max(1, readers)
        self.page = page
        self._looked = 0.0
        self._limit: int | None = None
        self._free_at = time.monotonic()
        self._look()

    @property
    def limited(self) -> bool:
        return self._limit is not None

    def wait(self, rows: int) -> None:
        """Pay for rows that were read; 0 waits until something may be read at all."""
        self._look()
        if self._limit:
            self._free_at = max(self._free_at, time.monotonic()) + rows * self.readers / self._limit
        stopped_at = time.monotonic()
        while self._limit == 0 or (self._limit is not None and time.monotonic() < self._free_at):
            if self._limit == 0 and time.monotonic() - stopped_at > PATIENCE_S:
                raise ReadPaused(ReadPaused.CODE, "the rate limit is 0")
            left = self._free_at - time.monotonic()
            time.sleep(LOOK_S if self._limit == 0 else max(0.0, min(LOOK_S, left)))
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        fs, path = self.data_dir.path(self.control)
        try:
            with fs.open_input_stream(path) as source:
                self._limit = json.loads(source.read())["rate"]
        except (OSError, ValueError):
            return  # being rewritten, or gone: what held so far holds
        if self._limit and self.page.too_long(self._limit, self.readers):
            raise ReadPaused(ReadPaused.CODE, "the rate limit was lowered")
