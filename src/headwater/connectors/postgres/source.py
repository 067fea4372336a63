"""Postgres as a `Source` (`capture/source.py` has the contract): the roles, each over the functions of its module.

Why no event is lost that a read has not seen is said in `planner.py`, why the first read may begin when `entered` says
so in `slots.py`. `headwater.testing.check_source` is held against this class on real servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.capture.source import SplitRead
from headwater.capture.splits import Split
from headwater.connectors.postgres import catalogue, planner, slots
from headwater.connectors.postgres.catalogue import TableInfo
from headwater.connectors.postgres.client import PostgresConfig, connect, format_lsn, parse_lsn
from headwater.connectors.postgres.reader_process import ReaderProcess

if TYPE_CHECKING:
    from headwater.capture.source import Source


class LsnOffsets:
    """Positions of the log: 64-bit numbers, as text `X/Y`."""

    def parse(self, text: str) -> int:
        return parse_lsn(text)

    def format(self, offset: int) -> str:
        return format_lsn(offset)


@dataclass(frozen=True, slots=True)
class PostgresCatalogue:
    config: PostgresConfig

    def list_tables(self, schema: str | None = None) -> Sequence[tuple[str, str]]:
        with connect(self.config) as conn:
            return catalogue.list_tables(conn, schema)

    def describe(self, schema: str, name: str) -> TableInfo:
        with connect(self.config) as conn:
            return catalogue.describe(conn, schema, name)


@dataclass(frozen=True, slots=True)
class PostgresPlanner:
    config: PostgresConfig

    def plan_splits(self, table: TableInfo, *, rows_per_split: int) -> list[Split]:
        with connect(self.config) as conn:
            return planner.plan_splits(conn, table, rows_per_split=rows_per_split)


@dataclass(slots=True)
class PostgresRead:
    """A read that sees one snapshot; `high` is set when it has ended."""

    conn: Any
    low: str
    high: int = 0

    def texts(self, query: str) -> list[tuple[str | None, ...]]:
        from headwater.connectors.postgres.copytext import scan_copy_text
        from headwater.connectors.postgres.rowreader import RowReader

        found: list[tuple[str | None, ...]] = []
        for block in RowReader(self.conn, f"COPY ({query}) TO STDOUT"):
            width = bytes(block[: bytes(block).index(b"\n")]).count(b"\t") + 1
            scan = scan_copy_text(block, width)
            data = scan.data.tobytes()
            for starts, lengths in zip(scan.starts, scan.lengths, strict=True):
                pairs = zip(starts, lengths, strict=True)
                found.append(tuple(None if n < 0 else data[s : s + n].decode() for s, n in pairs))
        return found


@dataclass(frozen=True, slots=True)
class PostgresSplits:
    config: PostgresConfig

    def query(self, table: TableInfo, columns: Sequence[str], split: Split) -> str:
        return planner.split_query(table, columns, split).as_string()

    def open_read(self, table: TableInfo) -> AbstractContextManager[SplitRead]:
        return self._read(table)

    @contextmanager
    def _read(self, table: TableInfo) -> Iterator[SplitRead]:
        with connect(self.config, application="headwater read") as conn:
            with planner.marked_read(conn, table) as mark:
                read = PostgresRead(conn, mark.low)
                yield read
            read.high = mark.high

    def contains(self, low: str, transactions: Any) -> Any:
        return planner.visible(low, transactions["xid"])


class PostgresSource:
    """`made` is what an earlier object of the same source had made at the server: only that is ours to undo."""

    def __init__(self, config: PostgresConfig, made: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self.made: dict[str, Any] = {"slot": False, "publication": False, "tables": [], **(made or {})}
        self.offsets = LsnOffsets()
        self.catalogue = PostgresCatalogue(config)
        self.planner = PostgresPlanner(config)
        self.splits = PostgresSplits(config)

    @classmethod
    def from_options(cls, options: Mapping[str, str], made: Mapping[str, Any] | None = None) -> PostgresSource:
        return cls(PostgresConfig.from_options(options), made)

    def current_offset(self) -> int:
        with connect(self.config) as conn:
            return planner.current_lsn(conn)

    def prepare_table(self, table: TableInfo) -> str:
        with connect(self.config) as conn:
            state = slots.ensure_publication(conn, self.config, table)
            self.made["publication"] = self.made["publication"] or state.created
            if state.added:
                self.made["tables"] = [*self.made["tables"], [table.schema, table.name]]
            self.made["slot"] = slots.ensure_slot(conn, self.config).created or self.made["slot"]
            return str(slots.enter_stream(conn).xid)

    def entered(self, mark: str) -> bool:
        with connect(self.config) as conn:
            return slots.entry_satisfied(conn, slots.EntryMark(int(mark)))

    def waiting_for(self, mark: str) -> str:
        with connect(self.config) as conn:
            return slots.waiting_for(slots.blocking_transactions(conn, slots.EntryMark(int(mark))))

    def stream(self, directory: Path, *, start: int | None, acknowledged: int) -> ReaderProcess:
        return ReaderProcess(self.config, directory, start_lsn=start, acknowledged=acknowledged)

    def release_table(self, table: TableInfo) -> None:
        if [table.schema, table.name] in self.made["tables"] and not self.made["publication"]:
            with connect(self.config) as conn:
                slots.remove_table(conn, self.config, table)
        self.made["tables"] = [t for t in self.made["tables"] if t != [table.schema, table.name]]

    def release(self) -> None:
        with connect(self.config) as conn:
            if self.made["slot"]:
                slots.drop_slot(conn, self.config)
            if self.made["publication"]:
                slots.drop_publication(conn, self.config)
        self.made = {"slot": False, "publication": False, "tables": []}


if TYPE_CHECKING:
    # The type checker holds the class to the contract.
    _: type[Source[TableInfo]] = PostgresSource
