"""A directory that has worked for long: what each second costs does not grow with the seconds before.

Costs are counted in steps of SQLite's machine, not in time: they are the same wherever this runs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from headwater.errors import TransientError
from headwater.model.epoch import MAX_EPOCH
from headwater.runtime.sink_log import ChangeLog
from headwater.storage import tables as t
from headwater.storage.checkpoint import Contribution, JobRow, NewSegment
from headwater.storage.meta import MAIN_LANE, MAX_ERRORS_KEPT, MetaStore

EPOCHS: Final = 100_000
YOUNG: Final = 1_000
DROPS: Final = 1_000
KEPT: Final = 3_600  # epochs within retention, one a second
FLOOR: Final = 1000  # steps that nobody notices
GROWTH: Final = 1.5  # an index over a hundred times as many rows is a level deeper
TABLE: Final = 1
SINK: Final = 2
SOURCE: Final = 3


class Steps:
    """Counts what SQLite does on all connections of a store."""

    def __init__(self, store: MetaStore) -> None:
        self.count = 0
        self._on = False
        store.engine.dispose()
        sa.event.listen(store.engine, "connect", self._watch)

    def _watch(self, connection: sqlite3.Connection, _record: Any) -> None:
        connection.set_progress_handler(self._step, 10)

    def _step(self) -> int:
        self.count += 10 * self._on
        return 0

    def of(self, work: Callable[[], object]) -> int:
        self.count, self._on = 0, True
        work()
        self._on = False
        return self.count


@contextmanager
def opened(path: Path) -> Iterator[MetaStore]:
    store = MetaStore(f"sqlite:///{path}/meta.db")
    yield store
    store.close()


def job(job_id: int, kind: str, lane: str = MAIN_LANE) -> JobRow:
    return JobRow(job_id, f"{kind}{job_id}", kind, "live", lane, "", {"inputs": [TABLE] if kind == "sink" else []})


def begun(store: MetaStore) -> None:
    store.acquire()
    jobs = [job(TABLE, "table"), job(SINK, "sink"), job(SOURCE, "source")]
    store.commit_checkpoint(MAIN_LANE, 1, Contribution(jobs_added=jobs), seq_high=1)


def lived(store: MetaStore, first: int, last: int) -> None:
    """Epochs as an engine commits them: a change, its merge into another file, a position, a statement, a letter."""
    insert(store, first, last, "epochs", f"'{MAIN_LANE}', e, 'checkpoint', e, 1")
    insert(store, first, last, "positions", f"{SOURCE}, e, '0/' || e")
    insert(store, first, last, "segments", f"e, {TABLE}, 'tables/1/' || e, 'delta', 1, 1, 1, e, e + 16")
    insert(store, first, last, "job_states", "0, printf('applied:%040d', e), e, '1'")
    insert(store, first, last, "dead_letters", f"e, {SINK} + e % 2 * 100, e, 1.0, 'C', 'r', 'l' || e, 1, 1")


def insert(store: MetaStore, first: int, last: int, table: str, values: str) -> None:
    """One row for each number from `first` up to `last`."""
    numbers = f"WITH RECURSIVE n(e) AS (SELECT {first} UNION ALL SELECT e + 1 FROM n WHERE e + 1 < {last})"
    with store.write() as db:
        db.exec_driver_sql(f"INSERT INTO {table} {numbers} SELECT {values} FROM n")


def letter(epoch: int) -> dict[str, Any]:
    return {"sink_id": SINK, "at": 1.0, "code": "C", "reason": "r", "path": f"l{epoch}", "rows": 1}


class Core:
    def __init__(self, meta: MetaStore) -> None:
        self.meta = meta


def costs(store: MetaStore, path: Path, newest: int) -> dict[str, int]:
    """What one second of an engine asks of its store, at the epochs from `newest` on."""
    steps = Steps(store)
    log = ChangeLog(Core(store), TABLE)
    error = TransientError("A", "what")

    def commit(epoch: int) -> None:
        added = [NewSegment(TABLE, f"tables/1/{epoch}", "delta", 1, 1)]
        removed = [s.id for s in store.segments_at(TABLE, epoch - 1)][:1]
        states = {(SINK, "log"): {"x": epoch}, (0, f"applied:{epoch:040d}"): 1}
        positions = {SOURCE: f"0/{epoch}"}
        what = Contribution(added, removed, positions=positions, states=states, dead_letters=[letter(epoch)])
        store.commit_checkpoint(MAIN_LANE, epoch, what, seq_high=epoch)

    def start() -> None:
        with opened(path) as other:
            other.acquire()
            other.committed_epoch()
            other.last_epoch_of_all()
            other.job_rows()
            store.generation = other.generation

    found = {"start": start_cost(path, start)}
    found["commit"] = steps.of(lambda: commit(newest))
    found["after the commit"] = steps.of(lambda: log.epochs(newest - 1, newest, 1 << 20))
    found["letters of the commit"] = steps.of(lambda: store.dead_letter_rows(SINK, [f"l{newest}"]))
    found["read"] = steps.of(lambda: store.segments_at(TABLE, newest))
    found["state"] = steps.of(lambda: (store.state(0, f"applied:{newest:040d}"), store.position(SOURCE)))
    found["horizon"] = steps.of(lambda: (store.last_epoch_before(newest - 7), store.oldest_epoch(), store.pin_rows()))
    found["error"] = steps.of(lambda: store.record_error(TABLE, "t", error, retrying=True))
    found["end of an error"] = steps.of(lambda: store.end_errors(TABLE, "t", "A", upto_s=1e12))
    found["backlog of a sink that is up to date"] = steps.of(lambda: log.backlog(newest - 5, newest))
    return found


def start_cost(path: Path, start: Callable[[], None]) -> int:
    """An own store is opened in it: its statements are counted by what SQLite says of the whole process."""
    counted: list[Steps] = []

    def watch(engine: sa.Engine) -> None:
        counted.append(steps := Steps.__new__(Steps))
        steps.count, steps._on = 0, True
        sa.event.listen(engine, "connect", steps._watch)

    from headwater.storage import meta

    connect = meta.connect

    def watched(url: str) -> sa.Engine:
        watch(engine := connect(url))
        return engine

    meta.connect = watched
    try:
        start()
    finally:
        meta.connect = connect
    return sum(steps.count for steps in counted)


def test_a_second_costs_the_same_after_a_hundred_thousand_epochs(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        begun(store)
        lived(store, 2, YOUNG)
        young = costs(store, tmp_path, YOUNG)
        lived(store, YOUNG + 1, EPOCHS)
        old = costs(store, tmp_path, EPOCHS)
    assert not slower(young, old)


def slower(young: dict[str, int], old: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {name: (young[name], old[name]) for name in old if old[name] > GROWTH * max(young[name], FLOOR)}


def swept(store: MetaStore, newest: int) -> dict[str, int]:
    """The garbage of one more epoch, and of none."""
    steps = Steps(store)
    store.expire(newest - KEPT - 1)
    return {
        "garbage of an epoch": steps.of(lambda: store.expire(newest - KEPT)),
        "no garbage": steps.of(lambda: store.expire(newest - KEPT)),
    }


def test_garbage_of_a_second_costs_the_same_after_a_hundred_thousand_epochs(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        begun(store)
        lived(store, 2, 2 * KEPT)
        young = swept(store, 2 * KEPT - 1)
        lived(store, 2 * KEPT, EPOCHS)
        old = swept(store, EPOCHS - 1)
        assert not slower(young, old)
        assert len(store.epoch_rows()) == len(store.position_rows()) == KEPT + 1
        assert len(store.all_segments()) <= KEPT + 17
        # A longer retention is not gone through each second, either.
        store.set_setting("horizon", "0")
        insert(store, 2, 80_000, "epochs", f"'{MAIN_LANE}', e, 'checkpoint', e, 1")
        assert not slower(young, {"no garbage": Steps(store).of(lambda: store.expire(2))})


def test_a_thousand_views_that_were_made_and_dropped_leave_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        begun(store)
        empty = {table.name: count(store, table) for table in t.metadata.sorted_tables}
        ended = f"'view', 'dropped', 'view v' || e, '', '{{}}', 1, {MAX_EPOCH}, 5"
        insert(store, 10, 10 + DROPS, "jobs", f"e, 'v' || e, {ended}")
        insert(store, 10, 10 + DROPS, "segments", "e, e, 'tables/' || e || '/a', 'delta', 1, 1, 1, 3, 5")
        insert(store, 10, 10 + DROPS, "epochs", "'view v' || e, 3, 'checkpoint', 1.0, 1")
        insert(store, 10, 10 + DROPS, "job_states", "e, 'creating', 3, '{}'")
        insert(store, 10, 10 + DROPS, "dead_letters", "e, e, 3, 1.0, 'C', 'r', 'l' || e, 1, 0")
        store.commit_checkpoint(MAIN_LANE, 9, Contribution(), seq_high=1)
        with_drops = Steps(store).of(lambda: store.expire(9))
        empty["settings"] += 1  # the horizon
        assert {table.name: count(store, table) for table in t.metadata.sorted_tables} == empty
        assert Steps(store).of(lambda: store.expire(9)) < with_drops / 100
        assert store.last_epoch_of_all() == 9


def count(store: MetaStore, table: sa.Table) -> int:
    with store.read() as db:
        return int(db.execute(sa.select(sa.func.count()).select_from(table)).scalar() or 0)


def test_the_error_log_is_bounded_and_keeps_what_is_open(tmp_path: Path) -> None:
    error = TransientError("A", "what")
    with opened(tmp_path) as store:
        begun(store)
        store.record_error(TABLE, "stopped", error, retrying=False)
        insert(store, 10, 100_000, "errors", f"e, 1.0, {SINK}, 'down', 'A', 'm', '', 1, NULL")
        store.record_error(SINK, "down", error, retrying=True)
        rows = store.error_rows()
        assert len(rows) == MAX_ERRORS_KEPT + 1 and rows[0]["name"] == "stopped"
        store.end_errors(TABLE, "stopped", "A", upto_s=1e12)
        store.record_error(SINK, "down", error, retrying=True)
        assert len(store.error_rows()) == MAX_ERRORS_KEPT
