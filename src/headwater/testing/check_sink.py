"""The contract test of sinks: run it against your own sink and its real target.

    from headwater.testing.check_sink import SinkUnderTest, check_sink
    check_sink(SinkUnderTest(spark=spark, columns=…, key=("id",), open=lambda generation: MySink(…), rows=read_target))

`open(generation)` makes a new object as a restarted engine would; `rows()` reads the target with means of its own and
gives the visible rows as a list of tuples in column order. Each check delivers a few batches with one kind of failure
in between and compares the target with a plain dictionary (upsert) or list (append-only). A failed check raises
AssertionError.

A sink that keeps its progress in memory only (`durable=False`) is spared the checks that need a restart. One that says
`takes_rows` is checked twice: with batches of Spark, and with rows in memory.

The columns are `id BIGINT NOT NULL, name STRING, amount DECIMAL(10,2)`, the key `id` (append-only sinks: none). With
`open_as(generation, columns, key)` and `rows_as(columns)` an upsert sink is also held to columns of any name, to keys
that look alike and to texts of any content; what its target cannot hold is said in `not_in_names` and `holds_nul`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError
from headwater.logstore import Backlog, ChunkRef, LogBuffer, LogEpoch, LogStoreReader, LogStoreState
from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, Column, quoted
from headwater.model.types import arrow_type
from headwater.sink.batch import RowBatch
from headwater.sink.delivery import DeliveryLoop
from headwater.sink.sink import Sink, Token

COLUMNS: Final = (
    Column("id", "BIGINT", nullable=False),
    Column("name", "STRING"),
    Column("amount", "DECIMAL(10,2)"),
)
KEY: Final = ("id",)
_ARROW: Final = pa.schema([*((c.name, arrow_type(c.type)) for c in COLUMNS), (OP, pa.int8())])
_DDL: Final = "id BIGINT, name STRING, amount DECIMAL(10,2), _op TINYINT"

Row = tuple[Any, ...]
Change = tuple[int, int, str | None, Decimal | None]


class Crash(BaseException):
    """The engine dies here. Not an Exception, so that no handler mistakes it for a failure to deal with."""


@dataclass
class SinkUnderTest:
    """How to open the sink of a generation, and how to read its target. Give each `check_…` call a fresh target."""

    spark: Any
    open: Callable[[int], Sink]
    rows: Callable[[], list[Row]]
    append_only: bool = False
    durable: bool = True
    in_memory: bool = False
    base_epoch: int = 1_000
    open_as: Callable[[int, Sequence[Column], Sequence[str]], Sink] | None = None
    rows_as: Callable[[Sequence[Column]], list[Row]] | None = None
    not_in_names: str = ""  # characters that a column's name cannot hold: refused before anything is made
    holds_nul: bool = True  # False: a text with U+0000 is a row that the target refuses
    _expected: list[Row] = field(default_factory=list)

    def batch(self, changes: Sequence[Change]) -> Any:
        rows = [(i, n, a, op) for op, i, n, a in changes]
        if self.in_memory:
            columns = zip(*rows, strict=True) if rows else [()] * len(_ARROW)
            return RowBatch(pa.table([pa.array(c, f.type) for c, f in zip(columns, _ARROW, strict=True)], _ARROW))
        return self.spark.createDataFrame(rows, _DDL)

    def expect(self, changes: Sequence[Change]) -> None:
        """Apply the changes to the model."""
        for op, number, name, amount in changes:
            if not self.append_only:
                self._expected = [r for r in self._expected if r[0] != number]
            if op == OP_UPSERT:
                self._expected.append((number, name, amount))

    def compare(self, when: str) -> None:
        found = sorted(self.rows(), key=repr)
        wanted = sorted(self._expected, key=repr)
        assert found == wanted, f"{when}: the target holds {found}, it should hold {wanted}"


def changes_of(number: int, *, append_only: bool) -> list[Change]:
    """The changes of the n-th batch: inserts, and for upsert sinks an update and a delete of earlier rows."""
    changes: list[Change] = [
        (OP_UPSERT, 10 * number + i, text, Decimal(f"{number}.{i:02d}"))
        for i, text in enumerate(["plain", 'quote " and \\ and ,', "ünï\ncode\t", "", None])
    ]
    if number > 1 and not append_only:
        changes.append((OP_UPSERT, 10 * (number - 1), f"updated in {number}", None))
        changes.append((OP_DELETE, 10 * (number - 1) + 1, None, None))
    return changes


class _Faulty:
    """A sink that fails once, before or after one of its steps; everything else is passed on."""

    def __init__(self, sink: Sink, step: str, *, after: bool, error: BaseException) -> None:
        self._sink, self._step, self._after, self._error = sink, step, after, error
        self._armed = True
        self.name = sink.name

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._sink, name)
        if name != self._step or not self._armed:
            return method

        def failing(*args: Any) -> Any:
            self._armed = False
            if self._after:
                method(*args)
            raise self._error

        return failing


def check_sink(make: Callable[[], SinkUnderTest]) -> None:
    """All checks; `make` gives a sink with a fresh, empty target each time."""
    for check in CHECKS:
        for in_memory in (False, True):
            under = make()
            under.in_memory = in_memory
            if applies(check, under):
                check(under)


def applies(check: Callable[[SinkUnderTest], None], under: SinkUnderTest) -> bool:
    """Whether a check makes sense for a sink."""
    if under.in_memory and not under.open(1).takes_rows:
        return False
    if check in (check_crash_at_every_step, check_zombie_cannot_commit):
        return under.durable
    if check in (check_columns_of_any_name, check_keys_that_look_alike_and_texts_of_any_content):
        return under.durable and under.open_as is not None and not under.append_only
    # A rewound append-only sink appends again, as asked.
    return check is not check_reset_allows_delivery_again or not under.append_only


def check_batches_arrive_in_order(under: SinkUnderTest) -> None:
    """Three batches one after the other, the last one empty, each visible when its delivery returns."""
    sink = _opened(under, 1)
    assert sink.last_committed() is None
    loop = DeliveryLoop(sink)
    assert loop.start(None) is None
    for number in (1, 2):
        _deliver(under, loop, number)
        under.compare(f"after batch {number}")
    epoch = under.base_epoch + 30
    loop.deliver(epoch - 10, epoch, lambda: under.batch([]))
    under.compare("after an empty batch")
    assert sink.last_committed() == epoch
    sink.close()
    sink.close()


def check_crash_at_every_step(under: SinkUnderTest) -> None:
    """The engine dies at each step of delivery; its successor finishes from the log, and each change is there once.

    The log store is the real one. What survives the engine is the target, the change log, and the log store's state as
    of the last checkpoint, which is never one that knows of the batch under way.
    """
    log = _Log(under)
    for number, point in enumerate(CRASH_POINTS, start=1):
        log.append(number)
        with contextlib.suppress(Crash):
            log.run(generation=2 * number, crash_at=point)
        if point not in ("after commit", "before truncate", "before checkpoint"):
            under.compare(f"after a crash {point}, before recovery")
        under.expect(changes_of(number, append_only=under.append_only))
        log.run(generation=2 * number + 1, crash_at=None)
        under.compare(f"after recovery from a crash {point}")
        log.checkpoint()


CRASH_POINTS: Final = (
    *("before prepare", "after prepare", "after write", "before commit", "after commit"),
    *("before truncate", "before checkpoint"),
)


class _Log:
    """The log of a sink and the engine around it, as far as a crash is concerned."""

    def __init__(self, under: SinkUnderTest) -> None:
        self.under = under
        self.committed = under.base_epoch
        self.stored = LogStoreState.starting_at(under.base_epoch).as_dict()
        self._reader: LogStoreReader | None = None

    def append(self, number: int) -> None:
        """A checkpoint commits the n-th epoch."""
        self.committed = _epoch(self.under, number)

    def epochs(self, after: int, up_to: int, limit: int) -> list[LogEpoch]:
        first = (after - self.under.base_epoch) // 10 + 1
        last = (up_to - self.under.base_epoch) // 10
        numbers = range(first, min(last, first + limit - 1) + 1)
        return [LogEpoch(e, (ChunkRef(e, 0, 1, 1, 1, ("s",)),)) for e in (_epoch(self.under, n) for n in numbers)]

    def backlog(self, after: int, up_to: int) -> Backlog:
        return Backlog(epochs=len(self.epochs(after, up_to, 1_000)))

    def checkpoint(self) -> None:
        assert self._reader is not None
        self.stored = self._reader.state.as_dict()

    def run(self, *, generation: int, crash_at: str | None) -> None:
        """An engine of some generation delivers all that is committed, unless it crashes."""
        sink = _opened(self.under, generation)
        when, _, step = (crash_at or "").partition(" ")
        faulty: Any = _Faulty(sink, step, after=when == "after", error=Crash())
        loop = DeliveryLoop(faulty)
        state = LogStoreState.from_dict(self.stored)
        reader = self._reader = LogStoreReader(state, self, LogBuffer(self.committed))
        try:
            reader.start_from(loop.start(state.delivered_to))
            while (batch := reader.next_batch(1_000, 1)) is not None:
                number = (batch.to_epoch - self.under.base_epoch) // 10
                changes = changes_of(number, append_only=self.under.append_only)
                loop.deliver(batch.from_epoch, batch.to_epoch, lambda c=changes: self.under.batch(c))  # type: ignore[misc]
                if crash_at == "before truncate":
                    raise Crash
                reader.delivered(batch)
                if crash_at == "before checkpoint":
                    raise Crash
        finally:
            with contextlib.suppress(HeadwaterError):
                sink.close()


def check_landed_commit_reported_failed_is_not_repeated(under: SinkUnderTest) -> None:
    """A commit that landed but was reported lost counts once; one that did not land is delivered again."""
    unknown = IndeterminateError("TEST_LOST", "the connection was lost while committing")
    sink = _opened(under, 1)
    for number, after in ((1, True), (2, False), (3, True)):
        faulty: Any = _Faulty(sink, "commit", after=after, error=unknown)
        loop = DeliveryLoop(faulty)
        loop.start(None)
        for _ in range(3):
            with contextlib.suppress(HeadwaterError):
                _deliver(under, loop, number, note=False)
                break
        under.expect(changes_of(number, append_only=under.append_only))
        under.compare(f"after an uncertain commit that {'landed' if after else 'was lost'}")
    sink.close()


def check_same_batch_again_is_skipped(under: SinkUnderTest) -> None:
    """A successor that does not know of the last commit and delivers it again changes nothing."""
    sink = _opened(under, 1)
    loop = DeliveryLoop(sink)
    loop.start(None)
    _deliver(under, loop, 1)
    token = sink.prepare(under.base_epoch, _epoch(under, 1))
    token = sink.write(token, under.batch(changes_of(1, append_only=under.append_only)))
    sink.commit(token)
    under.compare("after the same batch was committed again")
    assert sink.last_committed() == _epoch(under, 1)
    sink.close()


def check_zombie_cannot_commit(under: SinkUnderTest) -> None:
    """An engine that wakes up after its successor has claimed the sink is refused, whatever it had staged."""
    old = _opened(under, 1)
    DeliveryLoop(old).start(None)
    token = old.prepare(under.base_epoch, _epoch(under, 1))
    token = old.write(token, under.batch([(OP_UPSERT, 999, "zombie", None)]))
    new = _opened(under, 2)
    loop = DeliveryLoop(new)
    loop.start(None)
    _refused(lambda: old.commit(token))
    under.compare("after a zombie tried to commit")
    _deliver(under, loop, 1)
    _refused(lambda: old.commit(token))
    with contextlib.suppress(HeadwaterError):
        old.close()
    under.compare("after a zombie tried again")
    _deliver(under, loop, 2)
    under.compare("after the zombie is gone")
    new.close()
    _refused(lambda: _opened(under, 1).claim())


def check_abort_leaves_nothing(under: SinkUnderTest) -> None:
    """What was staged and given up is not visible, and the sink goes on."""
    sink = _opened(under, 1)
    loop = DeliveryLoop(sink)
    loop.start(None)
    token = sink.prepare(under.base_epoch, _epoch(under, 1))
    token = sink.write(token, under.batch(changes_of(1, append_only=under.append_only)))
    sink.abort(token)
    sink.abort(token)
    under.compare("after an abort")
    _deliver(under, loop, 1)
    under.compare("after the delivery that follows an abort")
    sink.close()


def check_reset_allows_delivery_again(under: SinkUnderTest) -> None:
    """After `reset` the target takes the same epochs again (upsert: with the same result)."""
    sink = _opened(under, 1)
    loop = DeliveryLoop(sink)
    loop.start(None)
    _deliver(under, loop, 1)
    sink.reset(under.base_epoch)
    assert sink.last_committed() == under.base_epoch
    _deliver(under, loop, 1)
    under.compare("after a rewind")
    sink.close()


# Every printable character of ASCII, the places where other languages put values, and 63 bytes.
NAMES: Final = (
    "".join(map(chr, range(0x20, 0x50))).strip(),
    "".join(map(chr, range(0x50, 0x7F))),
    *(
        "100%",
        "%s %(x)s %%",
        "{} {0}",
        "${x}",
        "${env:HOME}",
        "$1",
        "a.b",
        "a",
        "back\\slash\\",
        "a/b",
        "'one'",
        '"two"',
    ),
    *(
        "`three`",
        " first",
        "ünï ☃",
        "x" * 63,
        "select",
        "new\nline",
        "tab\tstop",
        "a;b",
        "a=b",
        "(c)",
        "a,b",
        "?",
        ":name",
    ),
)
ALIKE: Final = (
    *("", " ", "  ", "a", "A", "a ", "a  ", " a", "á", "a\u0301", "Á", "å", "\u212b", "Å", "ß", "ss", "SS", "ﬁ", "fi"),
    *(
        "i",
        "I",
        "İ",
        "ı",
        "0",
        "00",
        "1",
        "1.0",
        "1e0",
        "null",
        "NULL",
        "\\N",
        "\\.",
        "\\",
        "\\\\",
        "\\n",
        "\n",
        "\r\n",
    ),
    *("\t", "a\t", "a\n", "%s", "%", "%%", "{}", "${x}", "$1", "'", "''", '"', '""', "`", "--", "/*", ";", ",", "a,b"),
    *("\ufeff", "\ufeffa", "\uffff", "\ufffe", "\U0010ffff", "\ufdd0", "\u200d", "a\u00ad", "\x01", "\x7f", "\x1b[0m"),
)
WITH_NUL: Final = ("\x00", "a\x00", "a\x00b")


def check_columns_of_any_name(under: SinkUnderTest) -> None:
    """Columns of any name are delivered, found again after a restart, and delivered to again; or refused clearly."""
    assert under.open_as is not None
    refused = [n for n in NAMES if set(n) & set(under.not_in_names)]
    for name in refused:
        _refused_name(under, name)
    names = [n for n in NAMES if n not in refused]
    columns = (Column(names[0], "BIGINT", nullable=False), *(Column(n, "STRING") for n in names[1:]))
    key = (names[0], names[1])
    others = len(columns) - 2

    def row(number: int, text: str) -> Row:
        return (number, f"key {number}", *[f"{text} {i}" for i in range(others)])

    check_two_engines(under, columns, key, [row(i, "first") for i in range(3)], [row(1, "second")], [row(2, "gone")])


def _refused_name(under: SinkUnderTest, name: str) -> None:
    assert under.open_as is not None
    columns = (Column("id", "BIGINT", nullable=False), Column(name, "STRING"))
    sink = under.open_as(1, columns, KEY)
    code = _code_of(lambda: sink.validate(columns, KEY))
    sink.close()
    assert code == "SINK_NAME_REFUSED", f"column {name!r} got {code} instead of SINK_NAME_REFUSED"


def _code_of(action: Callable[[], Any]) -> str:
    """The code of the definite error that an action ends with."""
    try:
        action()
    except DefiniteError as error:
        return error.code
    return "nothing"


def check_keys_that_look_alike_and_texts_of_any_content(under: SinkUnderTest) -> None:
    """Keys that differ by case, accent, trailing space or normal form are different rows; texts arrive as they were."""
    assert under.open_as is not None
    columns = (Column("k", "STRING", nullable=False), Column("v", "STRING"))
    texts = [*ALIKE, *(WITH_NUL if under.holds_nul else ())]
    rows = [(k, v) for k, v in zip(texts, [*texts[1:], texts[0]], strict=True)]
    changed = [(k, f"{k}{k}") for k in texts[::2]]
    check_two_engines(under, columns, ("k",), rows, changed, [(k, None) for k in texts[1::3] if k not in dict(changed)])
    if under.holds_nul:
        return
    sink = under.open_as(3, columns, ("k",))
    sink.validate(columns, ("k",))
    loop = DeliveryLoop(sink)
    loop.start(None)
    for row in (("a\x00", "v"), ("k", "a\x00b")):
        code = _code_of(lambda r=row: loop.deliver(2_000, 2_010, lambda: _batch(under, columns, [(*r, OP_UPSERT)])))  # type: ignore[misc]
        assert code == "SINK_ROW_REFUSED", f"U+0000 got {code} instead of SINK_ROW_REFUSED"
    sink.close()


def check_two_engines(
    under: SinkUnderTest,
    columns: Sequence[Column],
    key: Sequence[str],
    first: Sequence[Row],
    second: Sequence[Row],
    gone: Sequence[Row],
) -> None:
    """An engine delivers the first rows, its successor upserts the second and deletes those that are gone."""
    assert under.open_as is not None and under.rows_as is not None
    places = [[c.name for c in columns].index(k) for k in key]
    model: dict[Row, Row] = {}
    batches = ([(*r, OP_UPSERT) for r in first], [*((*r, OP_UPSERT) for r in second), *((*r, OP_DELETE) for r in gone)])
    for generation, rows in enumerate(batches, start=1):
        sink = under.open_as(generation, columns, key)
        sink.validate(columns, key)
        loop = DeliveryLoop(sink)
        epoch = under.base_epoch + 10 * generation
        assert loop.start(None) == (None if generation == 1 else epoch - 10), "the target does not know how far it is"
        loop.deliver(epoch - 10, epoch, lambda r=rows: _batch(under, columns, r))  # type: ignore[misc]
        assert sink.last_committed() == epoch
        sink.close()
        for *row, op in rows:
            place = tuple(row[i] for i in places)
            model.pop(place, None)
            if op == OP_UPSERT:
                model[place] = tuple(row)
        found, wanted = (sorted(r, key=repr) for r in (under.rows_as(columns), model.values()))
        wrong = [r for r in found if r not in wanted] + [r for r in wanted if r not in found]
        assert found == wanted, (
            f"after engine {generation}: {len(found)} rows, {len(wanted)} expected, e.g. {wrong[:4]}"
        )


def _batch(under: SinkUnderTest, columns: Sequence[Column], rows: Sequence[Row]) -> Any:
    if under.in_memory:
        schema = pa.schema([*((c.name, arrow_type(c.type)) for c in columns), (OP, pa.int8())])
        values = zip(*rows, strict=True)
        return RowBatch(pa.table([pa.array(v, f.type) for v, f in zip(values, schema, strict=True)], schema))
    ddl = ", ".join(f"{quoted(c.name)} {c.type}" for c in columns)
    return under.spark.createDataFrame(list(rows), f"{ddl}, {OP} TINYINT")


CHECKS: Final[tuple[Callable[[SinkUnderTest], None], ...]] = (
    check_batches_arrive_in_order,
    check_crash_at_every_step,
    check_landed_commit_reported_failed_is_not_repeated,
    check_same_batch_again_is_skipped,
    check_zombie_cannot_commit,
    check_abort_leaves_nothing,
    check_reset_allows_delivery_again,
    check_columns_of_any_name,
    check_keys_that_look_alike_and_texts_of_any_content,
)


def _opened(under: SinkUnderTest, generation: int) -> Sink:
    sink = under.open(generation)
    sink.validate(COLUMNS, () if under.append_only else KEY)
    return sink


def _epoch(under: SinkUnderTest, number: int) -> int:
    return under.base_epoch + 10 * number


def _deliver(under: SinkUnderTest, loop: DeliveryLoop, number: int, *, note: bool = True) -> None:
    """Deliver the n-th batch; with `note`, the model takes it too."""
    changes = changes_of(number, append_only=under.append_only)
    loop.deliver(_epoch(under, number - 1), _epoch(under, number), lambda: under.batch(changes))
    if note:
        under.expect(changes)


def _refused(action: Callable[[], None]) -> None:
    code = _code_of(action)
    assert code == "SINK_FENCED", f"a zombie got {code} instead of SINK_FENCED"


__all__ = ["CHECKS", "COLUMNS", "CRASH_POINTS", "KEY", "Crash", "SinkUnderTest", "Token", "applies", "check_sink"]
