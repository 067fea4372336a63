"""The meta store: everything that must survive, in one SQL database, SQLite (embedded) or PostgreSQL (shared).

    commit_checkpoint   one transaction per checkpoint (I1), refused for an owner of an older generation (I9)
    reads               short transactions of their own; visibility by epoch comparison

Every commit locks the owner's row until it ends. So whoever gets that lock knows that no earlier commit is still under
way: `acquire` fences with it, `settle` waits with it, and a commit whose connection broke is read back behind it. Only
if that fails too is the outcome unknown (IndeterminateError); then `settle` before anything staged is deleted.

`apply.py` has the statements of a commit, `tables.py` the schema, `connection.py` the database's own ways.
All methods block; the engine calls them from a thread.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError, UsageError
from headwater.model.epoch import MAX_EPOCH
from headwater.storage import tables as t
from headwater.storage.apply import (
    apply_contribution,
    changed_setting,
    forget_before,
    get_setting,
    groups,
    set_pin,
    set_setting,
)
from headwater.storage.checkpoint import Contribution, JobRow, Segment, SplitRow
from headwater.storage.connection import connect, is_locked, meta_error

MAIN_LANE: Final = t.MAIN_LANE
MAX_ERRORS_KEPT: Final = 1000  # newest rows of hw_errors; enough for a day of one error a minute
# A commit of ours takes milliseconds; a server that holds its lock longer has lost us and has not noticed yet.
LOCK_TIMEOUT_S: Final = 10


class MetaStore:
    """One open meta store. `generation` is 0 until `acquire` made us its owner."""

    def __init__(self, url: str, *, now_s: Any = time.time) -> None:
        self.url = url
        self.now_s = now_s
        self.generation = 0
        self.engine = connect(url)
        self.writer = self.engine.execution_options(immediate=True)
        self._prepare()

    # -- life cycle ---------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Create or migrate, in one transaction: a crash in between leaves the store as it was."""
        try:
            with self.writer.begin() as db:
                _limit_lock_wait(db)
                if db.dialect.name == "postgresql":
                    # Two engines that start at once must not both create it.
                    db.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATION_LOCK)))
                version = _schema_version(db)
                if version is None:
                    t.metadata.create_all(db)
                    set_setting(db, "schema_version", str(t.SCHEMA_VERSION))
                else:
                    _migrate(db, version)
                if db.execute(sa.select(t.owner.c.id)).scalar() is None:
                    db.execute(t.owner.insert().values(id=1, generation=0, owner=""))
        except SQLAlchemyError as error:
            raise meta_error(error, self.engine) from error

    def acquire(self) -> int:
        """Become the owner: every older owner's commits are refused from now on."""
        with self.write() as db:
            _limit_lock_wait(db)
            name = f"{socket.gethostname()}:{os.getpid()}"
            # Counted up by the database itself: of two engines that do this at once, each gets a number of its own.
            db.execute(
                t.owner.update().where(t.owner.c.id == 1).values(generation=t.owner.c.generation + 1, owner=name)
            )
            generation = int(db.execute(sa.select(t.owner.c.generation).where(t.owner.c.id == 1)).scalar_one())
        self.generation = generation
        return generation

    def settle(self) -> None:
        """Wait until no commit is under way any more, and make sure that we are still the owner.

        To be called before anything staged is deleted: afterwards what is committed is all that will ever be, and what
        is not referred to is ours to delete. Raises ENGINE_FENCED, or TransientError while it cannot be told.
        """
        with self.write() as db:
            _limit_lock_wait(db)
            self._check_owner(db)

    def require_owner(self) -> None:
        """ENGINE_FENCED if there is a newer owner; only looks, and waits for nobody."""
        with self.read() as db:
            current = int(db.execute(sa.select(t.owner.c.generation).where(t.owner.c.id == 1)).scalar() or 0)
        if current != self.generation:
            raise self._fenced(current)

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        try:
            with self.engine.connect() as db:
                yield db
        except SQLAlchemyError as error:
            raise meta_error(error, self.engine) from error

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        try:
            with self.writer.begin() as db:
                yield db
        except SQLAlchemyError as error:
            raise meta_error(error, self.engine) from error

    # -- the commit ---------------------------------------------------------------------------------------------

    def commit_checkpoint(self, lane: str, epoch: int, contribution: Contribution, *, seq_high: int) -> dict[int, int]:
        """Commit one epoch of one lane; the whole contribution becomes visible, or nothing does.

        Gives {index into segments_added: segment id}. Raises DefiniteError ENGINE_FENCED if another engine took over,
        ValueError if the epoch does not follow the lane's last one.
        """
        try:
            with self.writer.begin() as db:
                _limit_lock_wait(db)
                self._check_owner(db)
                self._check_order(db, lane, epoch)
                ids = apply_contribution(db, epoch, contribution)
                # Lanes commit beside each other: a lower mark must not undo a higher one.
                set_setting(db, "seq_high", str(max(seq_high, int(get_setting(db, "seq_high", "0")))))
                db.execute(
                    t.epochs.insert().values(
                        lane=lane,
                        epoch=epoch,
                        kind="checkpoint",
                        committed_at=self.now_s(),
                        generation=self.generation,
                    )
                )
            return ids
        except DBAPIError as error:
            if is_locked(error):  # a statement did not get its turn, and was taken back with all before it
                raise meta_error(error, self.engine) from error
            return self._read_back(lane, epoch, contribution, error)
        except SQLAlchemyError as error:  # no connection could be had: nothing was sent
            raise meta_error(error, self.engine) from error

    def _read_back(self, lane: str, epoch: int, contribution: Contribution, error: DBAPIError) -> dict[int, int]:
        """The commit failed in a way that may still have landed: ask, behind the lock that it held."""
        try:
            with self.writer.begin() as db:
                _limit_lock_wait(db)
                current = self._lock_owner(db)
                if self._landed(db, lane, epoch):
                    return _ids_of(db, epoch, contribution)
        except SQLAlchemyError as unreadable:
            raise IndeterminateError(
                "COMMIT_UNKNOWN",
                f"the outcome of epoch {epoch} is not known",
                detail=type(error.orig).__name__,
                hint="the meta store cannot be reached; the engine reads the outcome back when it can",
            ) from unreadable
        if current != self.generation:
            raise self._fenced(current) from error
        raise meta_error(error, self.engine) from error

    def _landed(self, db: sa.Connection, lane: str, epoch: int) -> bool:
        """Whether *our* commit is there: the engine that fenced us may have used the same number."""
        c = t.epochs.c
        query = sa.select(c.epoch).where(c.lane == lane, c.epoch == epoch, c.generation == self.generation)
        return db.execute(query).scalar() is not None

    def _lock_owner(self, db: sa.Connection) -> int:
        query = sa.select(t.owner.c.generation).where(t.owner.c.id == 1)
        if db.dialect.name == "postgresql":
            query = query.with_for_update()
        return int(db.execute(query).scalar() or 0)

    def _check_owner(self, db: sa.Connection) -> None:
        current = self._lock_owner(db)
        if current != self.generation:
            raise self._fenced(current)

    def _fenced(self, current: int) -> DefiniteError:
        return DefiniteError(
            "ENGINE_FENCED",
            "another engine has taken over this meta store",
            detail=f"own generation {self.generation}, current {current}",
            hint="stop this engine; the newer one goes on from the last checkpoint",
        )

    def _check_order(self, db: sa.Connection, lane: str, epoch: int) -> None:
        last = db.execute(sa.select(sa.func.max(t.epochs.c.epoch)).where(t.epochs.c.lane == lane)).scalar() or 0
        if epoch <= last:
            raise ValueError(f"epoch {epoch} of lane {lane} does not follow {last}")

    def is_committed(self, lane: str, epoch: int) -> bool:
        """Whether our own commit of this epoch is there."""
        with self.read() as db:
            return self._landed(db, lane, epoch)

    # -- epochs, positions, settings ------------------------------------------------------------------------------

    def committed_epoch(self, lane: str = MAIN_LANE) -> int:
        with self.read() as db:
            return int(
                db.execute(sa.select(sa.func.max(t.epochs.c.epoch)).where(t.epochs.c.lane == lane)).scalar() or 0
            )

    def last_epoch_of_all(self) -> int:
        c = t.epochs.c
        with self.read() as db:
            lanes = [sa.select(sa.func.max(c.epoch)).where(c.lane == lane) for lane in groups(db, c.lane)]
            return max((int(db.execute(query).scalar() or 0) for query in lanes), default=0)

    def epoch_rows(self, lane: str = MAIN_LANE) -> list[dict[str, Any]]:
        with self.read() as db:
            query = sa.select(t.epochs).where(t.epochs.c.lane == lane).order_by(t.epochs.c.epoch)
            return [dict(r._mapping) for r in db.execute(query)]

    def last_epoch_before(self, epoch: int) -> int:
        """The newest main epoch at or before another."""
        with self.read() as db:
            query = sa.select(sa.func.max(t.epochs.c.epoch)).where(
                t.epochs.c.lane == MAIN_LANE, t.epochs.c.epoch <= epoch
            )
            return int(db.execute(query).scalar() or 0)

    def oldest_epoch(self) -> int:
        with self.read() as db:
            query = sa.select(sa.func.min(t.epochs.c.epoch)).where(t.epochs.c.lane == MAIN_LANE)
            return int(db.execute(query).scalar() or 0)

    def epoch_at(self, unix_s: float) -> int | None:
        """The last main epoch committed at or before a moment."""
        with self.read() as db:
            query = sa.select(sa.func.max(t.epochs.c.epoch)).where(
                t.epochs.c.lane == MAIN_LANE, t.epochs.c.committed_at <= unix_s
            )
            return db.execute(query).scalar()

    def epochs_between(self, after: int, upto: int) -> list[int]:
        with self.read() as db:
            query = (
                sa.select(t.epochs.c.epoch)
                .where(t.epochs.c.lane == MAIN_LANE, t.epochs.c.epoch > after, t.epochs.c.epoch <= upto)
                .order_by(t.epochs.c.epoch)
            )
            return [int(e) for e in db.execute(query).scalars()]

    def position(self, source_id: int) -> str | None:
        with self.read() as db:
            query = (
                sa.select(t.positions.c.position)
                .where(t.positions.c.source_id == source_id)
                .order_by(t.positions.c.epoch.desc())
                .limit(1)
            )
            return db.execute(query).scalar()

    def position_rows(self) -> list[dict[str, Any]]:
        with self.read() as db:
            return [dict(r._mapping) for r in db.execute(sa.select(t.positions))]

    def setting(self, name: str, default: str | None = None) -> str | None:
        with self.read() as db:
            value = db.execute(sa.select(t.settings.c.value).where(t.settings.c.name == name)).scalar()
            return default if value is None else str(value)

    def settings(self, prefix: str) -> dict[str, str]:
        with self.read() as db:
            rows = db.execute(sa.select(t.settings).where(t.settings.c.name.startswith(prefix, autoescape=True)))
            return {r.name[len(prefix) :]: r.value for r in rows}

    def set_setting(self, name: str, value: str) -> None:
        with self.write() as db:
            set_setting(db, name, value)

    @property
    def seq_high(self) -> int:
        return int(self.setting("seq_high", "0") or 0)

    # -- jobs, splits, states -------------------------------------------------------------------------------------

    def job_rows(self, *, dropped: bool = False) -> list[JobRow]:
        with self.read() as db:
            query = sa.select(t.jobs).order_by(t.jobs.c.id)
            if not dropped:
                query = query.where(t.jobs.c.dropped_epoch == MAX_EPOCH)
            return [JobRow(**r._mapping) for r in db.execute(query)]

    def next_job_id(self) -> int:
        with self.read() as db:
            highest = int(db.execute(sa.select(sa.func.max(t.jobs.c.id))).scalar() or 0)
            return max(highest + 1, int(get_setting(db, "next_job_id", "1")))

    def split_rows(self, table_id: int | None = None) -> list[SplitRow]:
        with self.read() as db:
            query = sa.select(t.splits).order_by(t.splits.c.table_id, t.splits.c.generation, t.splits.c.split_id)
            if table_id is not None:
                query = query.where(t.splits.c.table_id == table_id)
            return [SplitRow(**r._mapping) for r in db.execute(query)]

    def state(self, job_id: int, part: str) -> Any:
        with self.read() as db:
            query = sa.select(t.job_states.c.value).where(t.job_states.c.job_id == job_id, t.job_states.c.part == part)
            return db.execute(query).scalar()

    def had_stopped(self, job: JobRow, epoch: int) -> bool:
        """Whether a view was not what its inputs were at an epoch: it had failed before, and recovered after it."""
        if job.kind != "view":
            return False
        now = [(self.state(job.id, "consumed") or 0, MAX_EPOCH)] if job.state == "failed" else []
        return any(after < epoch < until for after, until in [*(self.state(job.id, "gaps") or []), *now])

    def states(self, job_id: int) -> dict[str, Any]:
        with self.read() as db:
            rows = db.execute(sa.select(t.job_states).where(t.job_states.c.job_id == job_id))
            return {r.part: r.value for r in rows}

    # -- segments -------------------------------------------------------------------------------------------------

    def segments_at(self, table_id: int, epoch: int) -> list[Segment]:
        c = t.segments.c
        # By the index of removals, in which the present ones are together; by the other one a table's whole retained
        # history would be gone through. `+ 0` keeps SQLite, which knows no numbers, from choosing that one.
        return self._segments(c.table_id == table_id, c.added_epoch + 0 <= epoch, c.removed_epoch > epoch)

    def change_segments(self, table_id: int, after: int, upto: int) -> list[Segment]:
        """The segments of the change log of (after, upto]."""
        return self._segments(*_changes(table_id, after, upto))

    def change_epochs(self, table_id: int, after: int, upto: int, limit: int) -> list[int]:
        """The epochs of (after, upto] that hold changes, oldest first, at most `limit` of them."""
        c = t.segments.c
        with self.read() as db:
            query = sa.select(c.added_epoch).distinct().where(*_changes(table_id, after, upto))
            return [int(e) for e in db.execute(query.order_by(c.added_epoch).limit(limit)).scalars()]

    def change_totals(self, table_id: int, after: int, upto: int) -> tuple[int, int, int]:
        """Rows, bytes and epochs of the change log of (after, upto]."""
        c = t.segments.c
        what = (sa.func.sum(c.rows), sa.func.sum(c.bytes), sa.func.count(c.added_epoch.distinct()))
        with self.read() as db:
            rows, size, epochs = db.execute(sa.select(*what).where(*_changes(table_id, after, upto))).one()
        return int(rows or 0), int(size or 0), int(epochs)

    def all_segments(self) -> list[Segment]:
        return self._segments()

    def _segments(self, *conditions: Any) -> list[Segment]:
        with self.read() as db:
            query = sa.select(t.segments).where(*conditions).order_by(t.segments.c.id)
            return [Segment(**r._mapping) for r in db.execute(query)]

    def segment_paths(self) -> set[str]:
        with self.read() as db:
            return set(db.execute(sa.select(t.segments.c.path)).scalars())

    def was_reset(self, table_id: int, after: int, upto: int) -> bool:
        with self.read() as db:
            c = t.resets.c
            query = sa.select(c.epoch).where(c.table_id == table_id, c.epoch > after, c.epoch <= upto).limit(1)
            return db.execute(query).scalar() is not None

    def reset_epochs(self, table_id: int, after: int, upto: int) -> list[int]:
        with self.read() as db:
            c = t.resets.c
            query = sa.select(c.epoch).where(c.table_id == table_id, c.epoch > after, c.epoch <= upto)
            return [int(e) for e in db.execute(query).scalars()]

    def changed_epoch(self, table_id: int) -> int:
        """When a table last changed, 0 for never; known also of a table that is empty, and of epochs that are not."""
        with self.read() as db:
            newest = [int(get_setting(db, changed_setting(table_id), "0"))]
            for table, column in ((t.segments, t.segments.c.added_epoch), (t.resets, t.resets.c.epoch)):
                query = sa.select(sa.func.max(column)).where(table.c.table_id == table_id)
                newest.append(int(db.execute(query).scalar() or 0))
            return max(newest)

    # -- pins and expiry ------------------------------------------------------------------------------------------

    def pin_rows(self) -> dict[str, int]:
        with self.read() as db:
            return {r.holder: r.epoch for r in db.execute(sa.select(t.pins))}

    def pin(self, holder: str, epoch: int) -> None:
        """Keep an epoch readable until `unpin`; refused if it has already been given up."""
        with self.write() as db:
            self._lock_owner(db)  # so that no expiry runs beside it; any process may pin
            horizon = int(get_setting(db, "horizon", "0"))
            if epoch < horizon:
                raise UsageError(
                    "EPOCH_NOT_AVAILABLE",
                    f"epoch {epoch} is no longer retained",
                    detail=f"the oldest retained epoch is {horizon}",
                    hint="choose a newer epoch, or raise retention_s",
                )
            set_pin(db, holder, epoch)

    def unpin(self, holder: str) -> None:
        with self.write() as db:
            db.execute(t.pins.delete().where(t.pins.c.holder == holder))

    def expire(self, horizon: int) -> list[str]:
        """Forget what no retained epoch can see; gives the paths whose files may now be deleted.

        Retained is every epoch from the one that was in force at `horizon` on, and from the oldest pin on; the last
        committed one always. The horizon never goes back: `oldest_epoch` and `pin` go by it.
        """
        with self.write() as db:
            self._check_owner(db)
            horizon = self._horizon(db, horizon)
            paths = forget_before(db, horizon)
            set_setting(db, "horizon", str(horizon))
        return paths

    def _horizon(self, db: sa.Connection, wanted: int) -> int:
        """The last committed epoch at or before what is wanted and pinned, but never before an earlier horizon."""
        pinned = db.execute(sa.select(sa.func.min(t.pins.c.epoch))).scalar()
        bound = wanted if pinned is None else min(wanted, int(pinned))
        c = t.epochs.c
        in_force = db.execute(sa.select(sa.func.max(c.epoch)).where(c.lane == MAIN_LANE, c.epoch <= bound)).scalar()
        return max(int(in_force or 0), int(get_setting(db, "horizon", "0")))

    # -- errors and dead letters ------------------------------------------------------------------------------------

    def record_error(
        self, job_id: int | None, name: str, error: HeadwaterError, *, retrying: bool, at_s: float | None = None
    ) -> None:
        with self.write() as db:
            db.execute(
                t.errors.insert().values(
                    at=self.now_s() if at_s is None else at_s,
                    job_id=job_id,
                    name=name,
                    code=error.code,
                    message=error.message + (f" ({error.detail})" if error.detail else ""),
                    hint=error.hint,
                    retrying=retrying,
                )
            )
            _forget_errors(db)

    def end_errors(self, job_id: int | None, name: str, code: str, *, upto_s: float) -> None:
        """The errors of this kind that are open and happened by then are over now."""
        c = t.errors.c
        whose = c.job_id.is_(None) if job_id is None else c.job_id == job_id
        where = (c.ended_at.is_(None), whose, c.name == name, c.code == code, c.at <= upto_s)
        with self.write() as db:
            db.execute(t.errors.update().where(*where).values(ended_at=self.now_s()))

    def error_rows(self) -> list[dict[str, Any]]:
        with self.read() as db:
            return [dict(r._mapping) for r in db.execute(sa.select(t.errors).order_by(t.errors.c.id))]

    def dead_letter_rows(self, sink_id: int | None = None, paths: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """All, those of a sink, or those of a sink in these files."""
        c = t.dead_letters.c
        query = sa.select(t.dead_letters).order_by(c.id)
        if sink_id is not None:
            query = query.where(c.sink_id == sink_id)
        if paths is not None:
            query = query.where(c.path.in_(paths))
        with self.read() as db:
            return [dict(r._mapping) for r in db.execute(query)]

    def mark_replayed(self, ids: Sequence[int]) -> None:
        with self.write() as db:
            db.execute(t.dead_letters.update().where(t.dead_letters.c.id.in_(ids)).values(replayed=True))


_CREATION_LOCK: Final = 0x4865616477617465  # "Headwate": any number that nobody else takes


def _changes(table_id: int, after: int, upto: int) -> tuple[sa.ColumnElement[bool], ...]:
    c = t.segments.c
    return c.table_id == table_id, c.added_epoch > after, c.added_epoch <= upto, c.is_change == sa.true()


def _forget_errors(db: sa.Connection) -> None:
    """All but the newest; of those that are open the last of each kind stays, however many others came since."""
    c, newer = t.errors.c, t.errors.alias()
    newest = int(db.execute(sa.select(sa.func.max(c.id))).scalar() or 0)
    same = (newer.c.name == c.name, newer.c.code == c.code, newer.c.job_id.is_not_distinct_from(c.job_id))
    again = sa.exists().where(newer.c.id > c.id, *same)
    db.execute(t.errors.delete().where(c.id <= newest - MAX_ERRORS_KEPT, c.ended_at.is_not(None) | again))


def _limit_lock_wait(db: sa.Connection) -> None:
    if db.dialect.name == "postgresql":
        db.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'")


def _ids_of(db: sa.Connection, epoch: int, contribution: Contribution) -> dict[int, int]:
    c = t.segments.c
    tables = {s.table_id for s in contribution.segments_added}
    query = sa.select(c.path, c.id).where(c.table_id.in_(tables), c.added_epoch == epoch)
    by_path = {row.path: row.id for row in db.execute(query)}
    return {i: by_path[s.path] for i, s in enumerate(contribution.segments_added)}


def _schema_version(db: sa.Connection) -> int | None:
    """None for a store that is still empty."""
    if not sa.inspect(db).has_table(t.settings.name):
        return None
    text = get_setting(db, "schema_version", "")
    if not text.isdigit():
        raise DefiniteError(
            "META_STORE_BROKEN",
            "the meta store does not say which schema it has",
            hint="restore it from a backup, or choose another data directory",
        )
    return int(text)


def _migrate(db: sa.Connection, version: int) -> None:
    if version > t.SCHEMA_VERSION:
        raise UsageError(
            "META_STORE_NEWER",
            f"the meta store has schema {version}, this Headwater knows {t.SCHEMA_VERSION}",
            hint="install the newer Headwater that wrote it",
        )
    for step in range(version, t.SCHEMA_VERSION):
        for statement in t.MIGRATIONS[step]:
            db.exec_driver_sql(statement)
    if version < t.SCHEMA_VERSION:
        set_setting(db, "schema_version", str(t.SCHEMA_VERSION))
