"""The contract test of sources: run it against your own connector and its real server.

    from headwater.testing.check_source import CHECKS, SourceUnderTest
    for check in CHECKS:
        check(SourceUnderTest(open=lambda: MySource(…), connect=lambda: driver.connect(…), schema="public", folder=tmp))

`open()` makes a new object as a restarted engine would; `connect()` gives a DB-API connection to the server, not in
autocommit mode. Each check makes tables of its own (plain SQL: INT and VARCHAR columns) and wants a source that nobody
else uses. A failed check raises AssertionError. What is checked is the prose of `capture/source.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.capture.source import ChangeStream, Source
from headwater.capture.splits import Split
from headwater.capture.spool import SpoolReader
from headwater.errors import UsageError

WAIT_S: Final = 60.0
LONG: Final = "long" * 200  # tells our transactions in the spool from a source's own, by their size
_names = itertools.count(1)


@dataclass
class SourceUnderTest:
    """How to make the source, and how to write to its server. Give each check a fresh folder."""

    open: Callable[[], Source[Any]]
    connect: Callable[[], Any]
    schema: str
    folder: Path
    tables: list[str] = field(default_factory=list)

    def table(self, *, rows: int = 0) -> str:
        name = f"hw_check_{next(_names)}"
        self.execute(f"CREATE TABLE {name} (id INT PRIMARY KEY, v VARCHAR(1000))")
        for first in range(1, rows + 1, 500):
            values = ", ".join(f"({i}, 'v{i}')" for i in range(first, min(first + 500, rows + 1)))
            self.execute(f"INSERT INTO {name} VALUES {values}")
        self.tables.append(name)
        return name

    def execute(self, *statements: str) -> None:
        """Run statements in one transaction that is committed on return."""
        connection = self.connect()
        try:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement)
            connection.commit()
        finally:
            connection.close()


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def check_offsets_have_the_order_of_the_stream(test: SourceUnderTest) -> None:
    source = test.open()
    name = test.table()
    before = source.current_offset()
    test.execute(f"INSERT INTO {name} VALUES (1, 'x')")
    after = source.current_offset()
    assert before < after, "a commit moves the current offset"
    for offset in (before, after):
        assert source.offsets.parse(source.offsets.format(offset)) == offset
    try:
        source.offsets.parse("no position")
    except UsageError:
        return
    raise AssertionError("a text that is no position must be refused")


def check_catalogue_describes_what_there_is(test: SourceUnderTest) -> None:
    source = test.open()
    name = test.table(rows=3)
    assert (test.schema, name) in list(source.catalogue.list_tables(test.schema))
    table = source.catalogue.describe(test.schema, name)
    assert [c.name for c in table.columns] == ["id", "v"]
    assert (tuple(table.key), table.ordered_key) == (("id",), True)
    try:
        source.catalogue.describe(test.schema, "hw_no_such_table")
    except UsageError:
        return
    raise AssertionError("a table that is not there must be refused")


def check_splits_cover_every_row_once(test: SourceUnderTest) -> None:
    source = test.open()
    for rows, least in ((0, 1), (1, 1), (2000, 5)):
        table = source.catalogue.describe(test.schema, test.table(rows=rows))
        splits = source.planner.plan_splits(table, rows_per_split=200)
        _check_ranges(splits)
        assert len(splits) >= least
        found: list[str | None] = []
        for split in splits:
            with source.splits.open_read(table) as read:
                found += [row[0] for row in read.texts(source.splits.query(table, ["id"], split))]
        assert sorted(map(int, found)) == list(range(1, rows + 1)), "each row is in one split"  # type: ignore[arg-type]


def _check_ranges(splits: Sequence[Split]) -> None:
    assert splits[0].left is None and splits[-1].right is None, "the outermost splits are open"
    for one, two in itertools.pairwise(splits):
        assert one.right == two.left and one.right is not None, "a split begins where the one before it ends"


def check_read_sees_one_state_and_says_which(test: SourceUnderTest) -> None:
    """Of each transaction of the stream `contains` tells whether the read had seen it, also one that was open."""
    source = test.open()
    name = test.table()
    table = source.catalogue.describe(test.schema, name)
    mark = source.prepare_table(table)
    _until(lambda: source.entered(mark), "nobody is writing: the table has entered at once")
    asyncio.run(_read_beside_writers(test, source, table, name))


async def _read_beside_writers(test: SourceUnderTest, source: Source[Any], table: Any, name: str) -> None:
    stream = source.stream(test.folder, start=None, acknowledged=0)
    await stream.start()
    try:
        start = stream.position
        test.execute(f"INSERT INTO {name} VALUES (1, '{LONG}')")
        open_one = test.connect()
        open_one.cursor().execute(f"INSERT INTO {name} VALUES (2, '{LONG}')")
        split = source.planner.plan_splits(table, rows_per_split=100)[0]
        with source.splits.open_read(table) as read:
            first = read.texts(source.splits.query(table, ["id"], split))
            test.execute(f"INSERT INTO {name} VALUES (3, '{LONG}')")
            again = read.texts(source.splits.query(table, ["id"], split))
        assert first == again == [("1",)], "a read sees one state"
        open_one.commit()
        open_one.close()
        assert read.high <= source.current_offset()
        await asyncio.wait_for(stream.wait_for(source.current_offset()), WAIT_S)
        found = SpoolReader(test.folder).transactions(start, stream.position)
        seen = [bool(s) for s, size in zip(source.splits.contains(read.low, found), found, strict=True) if _rows(size)]
        assert seen == [True, False, False], "in the order of commits: before, during, open"
    finally:
        await stream.stop()


def _rows(record: Any) -> bool:
    """A transaction with one of our rows: heartbeats are much smaller."""
    return int(record["end"] - record["start"]) > len(LONG)


def check_first_read_waits_for_open_transactions(test: SourceUnderTest) -> None:
    source = test.open()
    name = test.table(rows=1)
    writer = test.connect()
    writer.cursor().execute(f"INSERT INTO {name} VALUES (100, 'open')")
    table = source.catalogue.describe(test.schema, name)
    # The slot of the other checks exists: only making one waits for open transactions.
    mark = source.prepare_table(table)
    assert not source.entered(mark) and source.waiting_for(mark), "it is named what is waited for"
    writer.commit()
    writer.close()
    _until(lambda: source.entered(mark), "the transaction has ended")
    assert not source.waiting_for(mark)


def check_stream_is_whole_in_order_and_once_over_restarts(test: SourceUnderTest) -> None:
    source = test.open()
    name = test.table()
    source.prepare_table(source.catalogue.describe(test.schema, name))
    asyncio.run(_stream_and_restart(test, name))


async def _stream_and_restart(test: SourceUnderTest, name: str) -> None:
    acknowledged, positions, start = 0, [], None
    for part in range(3):
        source = test.open()
        stream = source.stream(test.folder, start=start, acknowledged=acknowledged)
        assert isinstance(stream, ChangeStream)
        await stream.start()
        for i in range(20):
            number = 20 * part + i
            test.execute(
                f"INSERT INTO {name} VALUES ({number}, '{LONG}')", f"UPDATE {name} SET v = 'b' WHERE id = {number}"
            )
        await asyncio.wait_for(stream.wait_for(source.current_offset()), WAIT_S)
        positions.append(stream.position)
        assert not stream.failed and stream.last_error is None and stream.connected
        if part == 1:
            acknowledged = positions[0]
            stream.ack(acknowledged)
            stream.ack(acknowledged - 1)
            assert stream.acknowledged == acknowledged, "it never goes back"
        await stream.stop()
    assert positions == sorted(positions), "the position never goes back"
    found = SpoolReader(test.folder).transactions(0, positions[-1])
    assert sum(_rows(r) for r in found) == 60, "every transaction once"
    assert (found["end_lsn"][1:] > found["end_lsn"][:-1]).all(), "in order"
    assert int(found["end_lsn"][-1]) <= positions[-1]


def check_position_of_an_idle_source_is_reached(test: SourceUnderTest) -> None:
    source = test.open()
    source.prepare_table(source.catalogue.describe(test.schema, test.table()))

    async def wait() -> None:
        stream = source.stream(test.folder, start=None, acknowledged=0)
        await stream.start()
        try:
            for _ in range(2):
                await asyncio.wait_for(stream.wait_for(source.current_offset()), WAIT_S)
        finally:
            await stream.stop()

    asyncio.run(wait())


def check_release_undoes_only_what_was_made(test: SourceUnderTest) -> None:
    """An object that found everything there releases nothing; the one that made it does."""
    maker, user = test.open(), test.open()
    table = maker.catalogue.describe(test.schema, test.table())
    maker.prepare_table(table)
    user.prepare_table(table)
    user.release_table(table)
    user.release()
    assert maker.entered(maker.prepare_table(table)), "it is still there"
    maker.release_table(table)
    maker.release()
    maker.release()


CHECKS: Final[tuple[Callable[[SourceUnderTest], None], ...]] = (
    check_offsets_have_the_order_of_the_stream,
    check_catalogue_describes_what_there_is,
    check_splits_cover_every_row_once,
    check_read_sees_one_state_and_says_which,
    check_first_read_waits_for_open_transactions,
    check_stream_is_whole_in_order_and_once_over_restarts,
    check_position_of_an_idle_source_is_reached,
    check_release_undoes_only_what_was_made,
)


def check_source(test: Callable[[], SourceUnderTest]) -> None:
    """All checks, each with a test of its own."""
    for check in CHECKS:
        check(test())
