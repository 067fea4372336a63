"""A checkpoint's contribution as SQL statements. Runs inside the one transaction that `meta.py` opens and ends.

Order matters: jobs come first, drops last, so that what a job that is being dropped still contributed (a barrier that
was already on its way to its actor) goes with it and leaves no segment visible and no pin behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from headwater.model.epoch import MAX_EPOCH
from headwater.storage import tables as t
from headwater.storage.checkpoint import PIN_THIS_EPOCH, Contribution, SplitRow


def apply_contribution(db: sa.Connection, epoch: int, what: Contribution) -> dict[int, int]:
    """Write all of it; gives {index into segments_added: segment id}."""
    _apply_jobs(db, epoch, what)
    ids = _apply_segments(db, epoch, what)
    _apply_states(db, epoch, what)
    _apply_drops(db, epoch, what)
    return ids


def set_setting(db: sa.Connection, name: str, value: str) -> None:
    if db.execute(t.settings.update().where(t.settings.c.name == name).values(value=value)).rowcount == 0:
        db.execute(t.settings.insert().values(name=name, value=value))


def get_setting(db: sa.Connection, name: str, default: str) -> str:
    value = db.execute(sa.select(t.settings.c.value).where(t.settings.c.name == name)).scalar()
    return default if value is None else str(value)


def set_pin(db: sa.Connection, holder: str, epoch: int) -> None:
    if db.execute(t.pins.update().where(t.pins.c.holder == holder).values(epoch=epoch)).rowcount == 0:
        db.execute(t.pins.insert().values(holder=holder, epoch=epoch))


def pin_holders(job_id: int) -> tuple[str, str]:
    """The names under which a job may pin an epoch; they go with the job."""
    return f"job:{job_id}", f"sink:{job_id}"


def _apply_jobs(db: sa.Connection, epoch: int, what: Contribution) -> None:
    for job in what.jobs_added:
        live = epoch if job.state == "live" else MAX_EPOCH
        db.execute(
            t.jobs.insert().values(
                id=job.id,
                name=job.name,
                kind=job.kind,
                state=job.state,
                lane=job.lane,
                definition=job.definition,
                spec=job.spec,
                created_epoch=epoch,
                live_epoch=live,
                dropped_epoch=MAX_EPOCH,
            )
        )
    if what.jobs_added:
        # Ids are never given twice, also after the last job was dropped and forgotten: files and targets carry them.
        highest = max(job.id for job in what.jobs_added)
        set_setting(db, "next_job_id", str(max(highest + 1, int(get_setting(db, "next_job_id", "1")))))
    for job_id, changes in what.job_updates.items():
        values = dict(changes)
        if values.pop("became_live", False):
            values["live_epoch"] = epoch
            _bring_back(db, epoch, job_id)
        if patch := values.pop("spec_patch", None):
            # Parts of a spec are changed by parts of the engine that do not know of each other.
            present = values.get("spec") or db.execute(sa.select(t.jobs.c.spec).where(t.jobs.c.id == job_id)).scalar()
            values["spec"] = {**(present or {}), **patch}
        if values:
            db.execute(t.jobs.update().where(t.jobs.c.id == job_id).values(**values))


def _bring_back(db: sa.Connection, epoch: int, job_id: int) -> None:
    """A lane's epochs may be ahead of the main one that its view joins: what they did is seen from there on."""
    c, r = t.segments.c, t.resets.c
    db.execute(t.segments.update().where(c.table_id == job_id, c.added_epoch > epoch).values(added_epoch=epoch))
    hidden = (c.table_id == job_id, c.removed_epoch > epoch, c.removed_epoch != MAX_EPOCH)
    db.execute(t.segments.update().where(*hidden).values(removed_epoch=epoch))
    if db.execute(t.resets.delete().where(r.table_id == job_id, r.epoch >= epoch)).rowcount:
        db.execute(t.resets.insert().values(table_id=job_id, epoch=epoch))


def _apply_segments(db: sa.Connection, epoch: int, what: Contribution) -> dict[int, int]:
    c = t.segments.c
    for table_id in dict.fromkeys(what.resets):
        visible = (c.table_id == table_id, c.removed_epoch == MAX_EPOCH, c.added_epoch < epoch)
        db.execute(t.segments.update().where(*visible).values(removed_epoch=epoch))
        db.execute(t.resets.insert().values(table_id=table_id, epoch=epoch))
    for chunk in _chunks(what.segments_removed, 500):
        db.execute(t.segments.update().where(c.id.in_(chunk), c.removed_epoch == MAX_EPOCH).values(removed_epoch=epoch))
    if not what.segments_added:
        return {}
    first = int(db.execute(sa.select(sa.func.max(c.id))).scalar() or 0) + 1
    first = max(first, int(get_setting(db, "next_segment_id", "0")))
    rows = [
        {
            "id": first + i,
            "table_id": s.table_id,
            "path": s.path,
            "kind": s.kind,
            "is_change": s.is_change,
            "rows": s.rows,
            "bytes": s.bytes,
            "added_epoch": epoch,
            "removed_epoch": MAX_EPOCH,
        }
        for i, s in enumerate(what.segments_added)
    ]
    db.execute(t.segments.insert(), rows)
    set_setting(db, "next_segment_id", str(first + len(rows)))
    return {i: first + i for i in range(len(rows))}


def _apply_states(db: sa.Connection, epoch: int, what: Contribution) -> None:
    for source_id, position in what.positions.items():
        db.execute(t.positions.insert().values(source_id=source_id, epoch=epoch, position=position))
    for table_id, generation in what.splits_cleared:
        c = t.splits.c
        db.execute(t.splits.delete().where(c.table_id == table_id, c.generation < generation))
    if what.splits:
        _put_splits(db, epoch, what.splits)
    for job_id in what.states_cleared:
        db.execute(t.job_states.delete().where(t.job_states.c.job_id == job_id))
    for (job_id, part), value in what.states.items():
        c = t.job_states.c
        where = (c.job_id == job_id, c.part == part)
        if db.execute(t.job_states.update().where(*where).values(epoch=epoch, value=value)).rowcount == 0:
            db.execute(t.job_states.insert().values(job_id=job_id, part=part, epoch=epoch, value=value))
    for holder in what.pins_dropped:
        db.execute(t.pins.delete().where(t.pins.c.holder == holder))
    for holder, pinned in what.pins.items():
        set_pin(db, holder, epoch if pinned == PIN_THIS_EPOCH else pinned)
    for row in what.dead_letters:
        db.execute(t.dead_letters.insert().values(epoch=epoch, replayed=False, **row))


def _put_splits(db: sa.Connection, epoch: int, splits: Sequence[SplitRow]) -> None:
    """In two statements, however many they are: a plan may have thousands. Of a split that is there twice the last."""
    c = t.splits.c
    rows = {(x.table_id, x.generation, x.split_id): _split_values(x, epoch) for x in splits}
    key = [c.table_id, c.generation, c.split_id]
    same = (column == sa.bindparam(f"this_{column.name}") for column in key)
    keys = [{f"this_{column.name}": part for column, part in zip(key, this, strict=True)} for this in rows]
    db.execute(t.splits.delete().where(*same), keys)
    db.execute(t.splits.insert(), list(rows.values()))


def _split_values(split: SplitRow, epoch: int) -> dict[str, Any]:
    values = {name: getattr(split, name) for name in split.__slots__}
    if split.state == "HANDED_OVER" and split.handed_over_epoch is None:
        values["handed_over_epoch"] = epoch
    return values


def _apply_drops(db: sa.Connection, epoch: int, what: Contribution) -> None:
    for job_id in what.jobs_dropped:
        where = (t.jobs.c.id == job_id, t.jobs.c.dropped_epoch == MAX_EPOCH)
        db.execute(t.jobs.update().where(*where).values(dropped_epoch=epoch, state="dropped"))
    # Barriers in flight bring contributions of a job after the checkpoint that dropped it: they follow it at once.
    touched = {*what.jobs_dropped, *(s.table_id for s in what.segments_added), *_jobs_of(what.pins)}
    for chunk in _chunks(sorted(touched), 500):
        query = sa.select(t.jobs.c.id).where(t.jobs.c.id.in_(chunk), t.jobs.c.dropped_epoch != MAX_EPOCH)
        for job_id in list(db.execute(query).scalars()):
            c = t.segments.c
            where = (c.table_id == job_id, c.removed_epoch == MAX_EPOCH)
            db.execute(t.segments.update().where(*where).values(removed_epoch=epoch))
            db.execute(t.pins.delete().where(t.pins.c.holder.in_(pin_holders(job_id))))


def _jobs_of(holders: Iterable[str]) -> list[int]:
    ids = (holder.partition(":")[2] for holder in holders)
    return [int(text) for text in ids if text.isdigit()]


def _chunks(items: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def forget_before(db: sa.Connection, horizon: int) -> list[str]:
    """Delete what no epoch from `horizon` on can see; gives the files that nothing refers to any more."""
    c = t.segments.c
    paths = list(db.execute(sa.select(c.path).where(c.removed_epoch <= horizon)).scalars())
    _remember_changes(db, horizon)
    db.execute(t.segments.delete().where(c.removed_epoch <= horizon))
    db.execute(t.resets.delete().where(t.resets.c.epoch <= horizon))
    _forget_superseded(db, t.epochs, t.epochs.c.lane, horizon)
    _forget_superseded(db, t.positions, t.positions.c.source_id, horizon)
    _forget_lanes(db, horizon)
    dropped = list(db.execute(sa.select(t.jobs.c.id).where(t.jobs.c.dropped_epoch <= horizon)).scalars())
    for some in _chunks(dropped, 200):
        paths += _forget_jobs(db, some)
    kept = set(db.execute(sa.select(c.path).where(c.path.in_(paths))).scalars()) if len(paths) < 500 else _all_paths(db)
    return [p for p in dict.fromkeys(paths) if p and p not in kept]


def _remember_changes(db: sa.Connection, horizon: int) -> None:
    """When each table last changed, as far as that is about to be forgotten: a table may have no segment left."""
    c, r = t.segments.c, t.resets.c
    gone = sa.union_all(
        sa.select(c.table_id, c.added_epoch.label("epoch")).where(c.removed_epoch <= horizon),
        sa.select(r.table_id, r.epoch).where(r.epoch <= horizon),
    ).subquery()
    newest = sa.select(gone.c.table_id, sa.func.max(gone.c.epoch)).group_by(gone.c.table_id)
    for table_id, epoch in list(db.execute(newest)):
        name = changed_setting(table_id)
        set_setting(db, name, str(max(int(epoch), int(get_setting(db, name, "0")))))


def changed_setting(table_id: int) -> str:
    return f"changed:{table_id}"


def _all_paths(db: sa.Connection) -> set[str]:
    return set(db.execute(sa.select(t.segments.c.path)).scalars())


def _forget_superseded(db: sa.Connection, table: sa.Table, group: sa.Column[Any], horizon: int) -> None:
    """Per group, what was in force at the horizon stays: an idle source keeps its position, a lane its last epoch.

    This runs once a second: each statement goes down the primary key, whatever number of epochs is retained.
    """
    epoch = table.c.epoch
    for value in groups(db, group):
        in_force = db.execute(sa.select(sa.func.max(epoch)).where(group == value, epoch <= horizon)).scalar()
        if in_force is not None:
            db.execute(table.delete().where(group == value, epoch < in_force))


def groups(db: sa.Connection, column: sa.Column[Any]) -> Iterator[Any]:
    """The values that the first column of a primary key has: one look into the index for each."""
    found = db.execute(sa.select(sa.func.min(column))).scalar()
    while found is not None:
        yield found
        found = db.execute(sa.select(sa.func.min(column)).where(column > found)).scalar()


def _forget_lanes(db: sa.Connection, horizon: int) -> None:
    """Lanes whose view has joined the main one, or was dropped: nothing asks for their last epoch any more."""
    c = t.epochs.c
    used = {t.MAIN_LANE, *db.execute(sa.select(t.jobs.c.lane).where(t.jobs.c.dropped_epoch == MAX_EPOCH)).scalars()}
    for lane in [lane for lane in groups(db, c.lane) if lane not in used]:
        db.execute(t.epochs.delete().where(c.lane == lane, c.epoch < horizon))


def _forget_jobs(db: sa.Connection, ids: Sequence[int]) -> list[str]:
    """Dropped jobs that no retained epoch shows."""
    paths: list[str] = []
    whose = {t.splits: t.splits.c.table_id, t.segments: t.segments.c.table_id, t.dead_letters: t.dead_letters.c.sink_id}
    for column in (t.splits.c.staged_path, t.segments.c.path, t.dead_letters.c.path):
        of_them = whose[column.table].in_(ids)
        paths += db.execute(sa.select(column).where(of_them)).scalars()
        db.execute(sa.delete(column.table).where(of_them))
    db.execute(t.resets.delete().where(t.resets.c.table_id.in_(ids)))
    db.execute(t.positions.delete().where(t.positions.c.source_id.in_(ids)))
    db.execute(t.job_states.delete().where(t.job_states.c.job_id.in_(ids)))
    db.execute(t.pins.delete().where(t.pins.c.holder.in_([name for i in ids for name in pin_holders(i)])))
    db.execute(t.settings.delete().where(t.settings.c.name.in_([changed_setting(i) for i in ids])))
    db.execute(t.jobs.delete().where(t.jobs.c.id.in_(ids)))
    return paths
