"""The contract of the meta store as checks that any database behind it must pass.

    check_meta_store(make_store)      all of them
    CHECKS                            one by one, for a test runner

`make_store(name)` opens the store of that name, a new and empty one at the first call, the same one again later.
A failing check raises AssertionError.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import sqlalchemy as sa

from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError, TransientError, UsageError
from headwater.model.epoch import MAX_EPOCH
from headwater.storage import tables as t
from headwater.storage.checkpoint import Contribution, JobRow, NewSegment, SplitRow
from headwater.storage.meta import MAIN_LANE, MetaStore

MakeStore = Callable[[str], MetaStore]
THREADS: Final = 6


def check_meta_store(make_store: MakeStore) -> None:
    """Run every check, each on a store of its own."""
    for name, check in CHECKS.items():
        check(make_store, name)


# -- tools ---------------------------------------------------------------------------------------------------------


def job(job_id: int, kind: str = "table", state: str = "live") -> JobRow:
    return JobRow(job_id, f"job{job_id}", kind, state, MAIN_LANE, "create", {"a": [1, None]})


def segment(path: str, table_id: int = 1) -> NewSegment:
    return NewSegment(table_id, path, "delta", 3, 100)


def full(epoch: int) -> Contribution:
    """Something of everything that a checkpoint can hold."""
    return Contribution(
        segments_added=[segment(f"f{epoch}")],
        jobs_added=[job(100 + epoch)],
        positions={7: f"0/{epoch}"},
        splits=[SplitRow(1, 0, epoch, None, '["5"]', "HANDED_OVER")],
        states={(1, f"p{epoch}"): {"x": epoch}},
        pins={f"reader{epoch}": epoch},
        dead_letters=[{"sink_id": 9, "at": 1.0, "code": "C", "reason": "r", "path": "d", "rows": 1}],
    )


def contents(store: MetaStore) -> list[list[str]]:
    with store.read() as db:
        return [sorted(repr(row) for row in db.execute(sa.select(table))) for table in t.metadata.sorted_tables]


@contextlib.contextmanager
def failing_commit(store: MetaStore, *, lands: bool, then: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The next COMMIT reports a lost connection, before or after it has landed."""
    dialect: Any = store.engine.dialect
    commit = dialect.do_commit

    def broken(connection: Any) -> None:
        dialect.do_commit = commit
        if lands:
            commit(connection)
        then()
        raise dialect.loaded_dbapi.OperationalError("the connection is lost")

    dialect.do_commit = broken
    try:
        yield
    finally:
        dialect.do_commit = commit


def raises(kind: type[BaseException], code: str | None, action: Callable[[], object]) -> None:
    try:
        action()
    except kind as error:
        found = error.code if isinstance(error, HeadwaterError) else None
        assert found == code, f"{found} instead of {code}"
    else:
        raise AssertionError(f"{kind.__name__} {code} was not raised")


def in_threads(*actions: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def owned(make_store: MakeStore, name: str) -> MetaStore:
    store = make_store(name)
    store.acquire()
    return store


# -- the commit ----------------------------------------------------------------------------------------------------


def a_commit_shows_all_of_its_contribution(make_store: MakeStore, name: str) -> None:
    store = owned(make_store, name)
    assert store.commit_checkpoint(MAIN_LANE, 5, full(5), seq_high=11) == {0: 1}
    assert (store.committed_epoch(), store.last_epoch_of_all(), store.seq_high) == (5, 5, 11)
    assert [j.id for j in store.job_rows()] == [105] and store.job_rows()[0].spec == {"a": [1, None]}
    assert (store.job_rows()[0].created_epoch, store.job_rows()[0].live_epoch) == (5, 5)
    assert store.position(7) == "0/5" and store.state(1, "p5") == {"x": 5} and store.pin_rows() == {"reader5": 5}
    (split,) = store.split_rows(1)
    assert (split.state, split.handed_over_epoch, split.right) == ("HANDED_OVER", 5, '["5"]')
    assert store.dead_letter_rows()[0]["epoch"] == 5
    again = make_store(name)
    assert contents(again) == contents(store)


def a_commit_that_fails_half_way_shows_nothing(make_store: MakeStore, name: str) -> None:
    store = owned(make_store, name)
    store.commit_checkpoint(MAIN_LANE, 5, full(5), seq_high=1)
    before = contents(store)
    bad = full(6)
    bad.dead_letters = [{"no_such_column": 1}]  # written last
    with contextlib.suppress(Exception):
        store.commit_checkpoint(MAIN_LANE, 6, bad, seq_high=2)
    assert contents(store) == before
    twice = full(6)
    twice.jobs_added = [job(105)]
    raises(DefiniteError, "META_STORE_ERROR", lambda: store.commit_checkpoint(MAIN_LANE, 6, twice, seq_high=2))
    assert contents(store) == before
    with failing_commit(store, lands=False):
        raises(
            TransientError,
            "META_STORE_UNAVAILABLE",
            lambda: store.commit_checkpoint(MAIN_LANE, 6, full(6), seq_high=2),
        )
    assert contents(store) == before


def epochs_of_a_lane_only_go_forward(make_store: MakeStore, name: str) -> None:
    store = owned(make_store, name)
    store.commit_checkpoint(MAIN_LANE, 5, Contribution(), seq_high=9)
    before = contents(store)
    raises(ValueError, None, lambda: store.commit_checkpoint(MAIN_LANE, 5, full(1), seq_high=2))
    raises(ValueError, None, lambda: store.commit_checkpoint(MAIN_LANE, 4, full(1), seq_high=2))
    assert contents(store) == before
    store.commit_checkpoint("other", 4, Contribution(), seq_high=3)
    assert (store.committed_epoch("other"), store.committed_epoch(), store.seq_high) == (4, 5, 9)


def an_older_owner_cannot_commit(make_store: MakeStore, name: str) -> None:
    old, new = owned(make_store, name), owned(make_store, name)
    assert new.generation == old.generation + 1
    before = contents(new)
    for action in (
        lambda: old.commit_checkpoint(MAIN_LANE, 5, full(5), seq_high=1),
        lambda: old.expire(MAX_EPOCH),
        old.settle,
    ):
        raises(DefiniteError, "ENGINE_FENCED", action)
    assert contents(new) == before
    new.settle()
    new.commit_checkpoint(MAIN_LANE, 5, full(5), seq_high=1)
    raises(DefiniteError, "ENGINE_FENCED", lambda: make_store(name).settle())  # who never acquired is not the owner


def owners_that_come_at_once_get_different_generations(make_store: MakeStore, name: str) -> None:
    make_store(name).close()
    stores = [make_store(name) for _ in range(THREADS)]
    in_threads(*(store.acquire for store in stores))
    assert sorted(store.generation for store in stores) == list(range(1, THREADS + 1))


def a_commit_that_landed_but_was_reported_failed_counts(make_store: MakeStore, name: str) -> None:
    store = owned(make_store, name)
    with failing_commit(store, lands=True):
        assert store.commit_checkpoint(MAIN_LANE, 5, full(5), seq_high=1) == {0: 1}
    assert store.committed_epoch() == 5
    store.commit_checkpoint(MAIN_LANE, 6, full(6), seq_high=1)


def the_same_epoch_of_another_owner_is_not_taken_for_ours(make_store: MakeStore, name: str) -> None:
    old = owned(make_store, name)

    def take_over() -> None:
        new = owned(make_store, name)
        new.commit_checkpoint(MAIN_LANE, 5, Contribution(), seq_high=1)

    dialect: Any = old.engine.dialect
    rollback = dialect.do_rollback

    def rolled_back_then_fenced(connection: Any) -> None:
        dialect.do_rollback = rollback
        rollback(connection)
        take_over()

    dialect.do_rollback = rolled_back_then_fenced
    try:
        with failing_commit(old, lands=False):
            raises(DefiniteError, "ENGINE_FENCED", lambda: old.commit_checkpoint(MAIN_LANE, 5, full(5), seq_high=1))
    finally:
        dialect.do_rollback = rollback
    assert not old.job_rows()


def an_outcome_that_cannot_be_read_back_is_unknown(make_store: MakeStore, name: str) -> None:
    store = owned(make_store, name)

    def unreachable(db: Any) -> int:
        raise sa.exc.OperationalError("", {}, Exception("no answer"))

    def lose() -> None:
        store._lock_owner = unreachable  # type: ignore[method-assign]

    with failing_commit(store, lands=True, then=lose):
        raises(IndeterminateError, "COMMIT_UNKNOWN", lambda: store.commit_checkpoint(MAIN_LANE, 5, full(5), seq_high=1))
    raises(TransientError, "META_STORE_UNAVAILABLE", store.settle)
    del store._lock_owner
    store.settle()
    assert store.is_committed(MAIN_LANE, 5)


def settling_waits_for_a_commit_that_is_still_under_way(make_store: MakeStore, name: str) -> None:
    """The server may still be at work on a commit whose connection we have lost."""
    store = owned(make_store, name)
    lost = make_store(name)
    lost.generation = store.generation
    locked, seen = threading.Event(), []

    def commit_slowly() -> None:
        apply = lost._check_order

        def wait(db: Any, lane: str, epoch: int) -> None:
            locked.set()
            apply(db, lane, epoch)
            threading.Event().wait(0.4)

        lost._check_order = wait  # type: ignore[method-assign]
        lost.commit_checkpoint(MAIN_LANE, 5, full(5), seq_high=1)

    def settle() -> None:
        locked.wait(10)
        store.settle()
        seen.append(store.committed_epoch())

    in_threads(commit_slowly, settle)
    assert seen == [5]


# -- visibility, pins, expiry --------------------------------------------------------------------------------------


def segments_are_visible_from_their_epoch_until_they_are_removed(make_store: MakeStore, name: str) -> None:
    store = owned(make_store, name)

    def paths(epoch: int) -> list[str]:
        return [s.path for s in store.segments_at(1, epoch)]

    store.commit_checkpoint(MAIN_LANE, 5, Contribution(segments_added=[segment("a"), segment("b")]), seq_high=1)
    ids = store.commit_checkpoint(MAIN_LANE, 7, Contribution(segments_added=[segment("c")]), seq_high=1)
    store.commit_checkpoint(
        MAIN_LANE,
        9,
        Contribution(segments_added=[NewSegment(1, "abc", "base", 9, 9, False)], segments_removed=[1, 2, ids[0]]),
        seq_high=1,
    )
    store.commit_checkpoint(MAIN_LANE, 11, Contribution(resets=[1, 1], segments_added=[segment("d")]), seq_high=1)
    found = [paths(e) for e in (4, 5, 6, 7, 8, 9, 10, 11)]
    assert found == [[], ["a", "b"], ["a", "b"], ["a", "b", "c"], ["a", "b", "c"], ["abc"], ["abc"], ["d"]]
    assert [s.path for s in store.change_segments(1, 5, 11)] == ["c", "d"]
    assert store.change_epochs(1, 0, 11, 10) == [5, 7, 11] and store.change_epochs(1, 0, 11, 2) == [5, 7]
    log = store.change_segments(1, 0, 11)
    assert store.change_totals(1, 0, 11) == (sum(s.rows for s in log), sum(s.bytes for s in log), 3)
    assert store.change_totals(1, 11, 99) == (0, 0, 0)
    assert store.was_reset(1, 9, 11) and not store.was_reset(1, 5, 10) and not store.was_reset(2, 0, 99)


def what_a_lane_did_ahead_of_the_epoch_that_it_joins_is_seen_from_there_on(make_store: MakeStore, name: str) -> None:
    store = owned(make_store, name)
    store.commit_checkpoint(MAIN_LANE, 5, Contribution(jobs_added=[job(1, "view", "creating")]), seq_high=1)
    store.commit_checkpoint("lane", 6, Contribution(segments_added=[segment("given up")]), seq_high=1)
    store.commit_checkpoint("lane", 8, Contribution(resets=[1]), seq_high=1)
    store.commit_checkpoint("lane", 9, Contribution(segments_added=[segment("kept")]), seq_high=1)
    joining = Contribution(job_updates={1: {"state": "live", "became_live": True}})
    store.commit_checkpoint(MAIN_LANE, 7, joining, seq_high=1)
    for epoch in (7, 8, 9):
        assert [s.path for s in store.segments_at(1, epoch)] == ["kept"]
    # Who had looked at it before learns that its log does not tell the change.
    assert store.was_reset(1, 6, 7) and not store.was_reset(1, 7, 9)


def a_dropped_job_leaves_nothing_visible_and_no_pin(make_store: MakeStore, name: str) -> None:
    store = owned(make_store, name)
    store.commit_checkpoint(MAIN_LANE, 5, Contribution(jobs_added=[job(1)], segments_added=[segment("a")]), seq_high=1)
    dying = Contribution(jobs_dropped=[1], segments_added=[segment("b")], pins={"job:1": 5, "sink:1": 5})
    store.commit_checkpoint(MAIN_LANE, 6, dying, seq_high=1)
    late = Contribution(segments_added=[segment("c")], pins={"sink:1": 6}, states={(1, "x"): 1})
    store.commit_checkpoint(MAIN_LANE, 7, late, seq_high=1)
    assert not store.segments_at(1, 6) and not store.segments_at(1, 7) and not store.pin_rows()
    assert [s.path for s in store.segments_at(1, 5)] == ["a"]
    assert sorted(store.expire(7)) == ["a", "b", "c"]
    assert not store.all_segments() and not store.job_rows(dropped=True) and not store.states(1)
    assert store.next_job_id() == 2  # an id is never given twice


def expiry_keeps_what_a_pin_or_the_last_epoch_needs(make_store: MakeStore, name: str) -> None:
    store = owned(make_store, name)
    for epoch in (5, 7, 9):
        what = Contribution(
            segments_added=[segment(f"s{epoch}")], segments_removed=[epoch // 2 - 2] if epoch > 5 else []
        )
        what.positions = {3: f"p{epoch}"} if epoch < 9 else {}
        store.commit_checkpoint(MAIN_LANE, epoch, what, seq_high=1)
        store.commit_checkpoint("lane", epoch + 1, Contribution(), seq_high=1)
    store.pin("reader", 6)
    assert store.expire(8) == [] and store.oldest_epoch() == 5
    store.unpin("reader")
    assert store.expire(8) == ["s5"]  # at 8 the epoch 7 is in force
    assert store.oldest_epoch() == 7 and [s.path for s in store.segments_at(1, 8)] == ["s7"]
    raises(UsageError, "EPOCH_NOT_AVAILABLE", lambda: store.pin("late", 6))
    store.pin("reader", 7)
    assert store.expire(MAX_EPOCH) == []
    store.unpin("reader")
    assert store.expire(MAX_EPOCH) == ["s7"]
    assert store.committed_epoch() == 9 and [r["epoch"] for r in store.epoch_rows()] == [9]
    assert store.committed_epoch("lane") == 10
    assert store.position(3) == "p7"  # an idle source keeps its position
    assert [s.path for s in store.segments_at(1, 9)] == ["s9"]


def the_last_change_of_a_table_is_known_when_nothing_of_it_is_left(make_store: MakeStore, name: str) -> None:
    store = owned(make_store, name)
    assert store.changed_epoch(1) == 0
    store.commit_checkpoint(MAIN_LANE, 5, Contribution(segments_added=[segment("s5")]), seq_high=1)
    emptied = Contribution(segments_removed=[s.id for s in store.segments_at(1, 5)])  # a compaction that left no row
    store.commit_checkpoint(MAIN_LANE, 7, emptied, seq_high=1)
    assert store.changed_epoch(1) == 5
    assert store.expire(MAX_EPOCH) == ["s5"] and store.changed_epoch(1) == 5
    store.commit_checkpoint(MAIN_LANE, 9, Contribution(resets=[1]), seq_high=1)  # emptied as a whole
    assert store.changed_epoch(1) == 9
    store.commit_checkpoint(MAIN_LANE, 11, Contribution(), seq_high=1)
    store.expire(MAX_EPOCH)
    assert store.changed_epoch(1) == 9


def readers_see_whole_epochs_while_others_write(make_store: MakeStore, name: str) -> None:
    store = owned(make_store, name)
    done = threading.Event()

    def write() -> None:
        try:
            for epoch in range(1, 31):
                both = Contribution(segments_added=[segment(f"a{epoch}", 1), segment(f"b{epoch}", 2)])
                store.commit_checkpoint(MAIN_LANE, epoch, both, seq_high=epoch)
        finally:
            done.set()

    def read() -> None:
        reader = make_store(name)
        while not done.is_set():
            with reader.read() as db:
                query = sa.select(sa.func.count(), sa.func.max(t.segments.c.added_epoch)).select_from(t.segments)
                count, newest = db.execute(query).one()
            assert count == 2 * (newest or 0), "half of an epoch was seen"
            epoch = reader.committed_epoch()
            assert len(reader.segments_at(1, epoch)) == len(reader.segments_at(2, epoch)) == epoch
        reader.close()

    def pin() -> None:
        pinner = make_store(name)
        while not done.is_set():
            pinner.pin("p", pinner.committed_epoch())
            pinner.unpin("p")
        pinner.close()

    in_threads(write, read, read, pin)


def errors_are_kept_and_bounded(make_store: MakeStore, name: str) -> None:
    store = owned(make_store, name)
    store.record_error(None, "n", TransientError("A", "what", detail="why", hint="do"), retrying=True)
    (row,) = store.error_rows()
    assert (row["code"], row["message"], row["hint"], row["retrying"]) == ("A", "what (why)", "do", True)
    store.set_setting("param_a", "1")
    store.set_setting("paramxb", "2")
    store.set_setting("param_a", "3")
    assert store.settings("param_") == {"a": "3"} and store.setting("none", "d") == "d"


CHECKS: Final[dict[str, Callable[[MakeStore, str], None]]] = {
    check.__name__: check
    for check in (
        a_commit_shows_all_of_its_contribution,
        a_commit_that_fails_half_way_shows_nothing,
        epochs_of_a_lane_only_go_forward,
        an_older_owner_cannot_commit,
        owners_that_come_at_once_get_different_generations,
        a_commit_that_landed_but_was_reported_failed_counts,
        the_same_epoch_of_another_owner_is_not_taken_for_ours,
        an_outcome_that_cannot_be_read_back_is_unknown,
        settling_waits_for_a_commit_that_is_still_under_way,
        segments_are_visible_from_their_epoch_until_they_are_removed,
        what_a_lane_did_ahead_of_the_epoch_that_it_joins_is_seen_from_there_on,
        a_dropped_job_leaves_nothing_visible_and_no_pin,
        expiry_keeps_what_a_pin_or_the_last_epoch_needs,
        the_last_change_of_a_table_is_known_when_nothing_of_it_is_left,
        readers_see_whole_epochs_while_others_write,
        errors_are_kept_and_bounded,
    )
}
