"""What only a new copy of a captured table heals: noticed here, once a second, and begun.

    a task or read found a definite error whose cause may be a change of shape    ─► copy with the new columns, or stop
    a task met a shape with other columns                                         ─► copy with the new columns
    a value or row that the stream left out and that we do not have               ─► copy
    the table was taken out of the publication, and perhaps put in again          ─► copy: meanwhile nothing was sent
    the publication's options were changed (`publish = 'insert'`)                 ─► the same
    another table has the captured one's name now                                 ─► copy of that one
    an ALTER changed old rows without an event                                    ─► copy
    its key is another one                                                        ─► copy if that was undone, or stop

`runtime/shape.py` says which columns a table gets, `backfill.py` makes the copy. A whole stream that is lost is
`SourceRuntime.heal`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from headwater.errors import DefiniteError, HeadwaterError, SourceError, TransientError
from headwater.runtime import source_setup as setup
from headwater.storage.checkpoint import Contribution

if TYPE_CHECKING:
    from headwater.connectors.postgres.catalogue import Present
    from headwater.connectors.postgres.layout import Layout
    from headwater.engine import EngineCore
    from headwater.runtime.backfill import TableBackfill
    from headwater.runtime.source_runtime import SourceRuntime

# The stream does not have what the table needs, but the source does.
TABLE_LOST: Final = frozenset({"TOAST_VALUE_UNKNOWN", "ROW_UNKNOWN", "SOURCE_TABLE_UNPUBLISHED", "SOURCE_KEY_CHANGED"})
# May come of another shape than the captured one.
SHAPE_SUSPECTS: Final = frozenset(
    {
        "SOURCE_SCHEMA_CHANGED",
        "SOURCE_COLUMN_NOT_FOUND",
        "VALUE_MALFORMED",
        "VALUE_NOT_REPRESENTABLE",
    }
)
LOOK_AGAIN_S: Final = 5.0  # after a try that failed, and at a publication that the reader knows otherwise


def being_healed(error: DefiniteError) -> DefiniteError:
    """The error without what else could be done: a RESYNC by hand would find the table being copied already."""
    hint = "nothing need be done: it is looked into now, and the table is copied again if that helps"
    return DefiniteError(error.code, error.message, detail=error.detail, hint=hint)


class Healing:
    """See the head of this module."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._lost: set[int] = set()
        self._reshaped: dict[int, str] = {}
        self._suspects: dict[int, HeadwaterError] = {}
        self._not_before: dict[int, float] = {}
        self._catalogue_at: dict[int, float] = {}
        self._renamed: dict[int, str] = {}
        self._partitions: dict[int, list[str]] = {}
        self._looked: set[int] = set()

    def recall(self, sources: list[SourceRuntime]) -> None:
        """At a start: tables that failed with something that heals, and whose new copy was not begun any more."""
        # What only stood in the way of a new copy (the source was away) does not hide what the table failed with.
        healable = TABLE_LOST | SHAPE_SUSPECTS
        newest = {e["job_id"]: e for e in self.core.meta.error_rows() if e["code"] in healable or not e["retrying"]}
        for source in sources:
            for table in source.tables.values():
                found = newest.get(table.table_id)
                if table.failed and found is not None and found["retrying"]:
                    error = SourceError(found["code"], found["message"], hint=f"RESYNC {table.name}")
                    self.table_failed(table, error)

    def heals(self, table_id: int) -> bool:
        """A new copy of the table is about to begin, or it is about to be found that none helps."""
        return table_id in self._lost or table_id in self._suspects or table_id in self._reshaped

    def quiet(self, source: SourceRuntime) -> bool:
        """The source was looked at since its reader is there, and nothing waits to be healed."""
        return source.job_id in self._looked and not any(self.heals(t) for t in source.tables)

    # -- what was found ---------------------------------------------------------------------------------------------

    def table_failed(self, table: TableBackfill, error: HeadwaterError) -> bool:
        """A task found a definite error in a table's events: the table is failed with this epoch.

        True: a new copy is tried here; if none helps, that is shown as an error that is not retried.
        """
        if error.code in TABLE_LOST:
            self._lost.add(table.table_id)
            return True
        return self.read_failed(table, error)

    def read_failed(self, table: TableBackfill, error: HeadwaterError) -> bool:
        """A read found a definite error. True: it is looked into here, and the table stopped if nothing helps."""
        if error.code not in SHAPE_SUSPECTS or table.policy == "exception":
            return False
        self._suspects[table.table_id] = error
        return True

    def on_shape_seen(self, table_id: int, what: str) -> None:
        self._reshaped[table_id] = what

    # -- once a second ----------------------------------------------------------------------------------------------

    async def look(self, sources: list[SourceRuntime]) -> None:
        for source in sources:
            if source.reader is None or source.failed or source.healing:
                continue
            await self._check_catalogue(source)
            for table in list(source.tables.values()):
                # While the user's RESYNC begins there is nothing to look into, and others need not wait for it.
                due = time.monotonic() >= self._not_before.get(table.table_id, 0.0)
                if due and not table.deciding.locked():
                    await self._guarded(table, functools.partial(self._heal, table))
            if source.reader is not None and source.reader.knows_publication:
                self._looked.add(source.job_id)

    async def _guarded(self, table: TableBackfill, work: Callable[[], Awaitable[None]]) -> None:
        """Not while the user's RESYNC begins, which ends what `work` was to look into; nor of a table that is gone."""
        async with table.deciding:
            if table.dropped:
                return
            try:
                await work()
            except KeyError:
                if not table.dropped:  # else it was while it was looked into, and there is nothing to heal
                    raise
            except TransientError as error:
                self._later(table)
                self.core.record_error(table.table_id, table.name, error, retrying=True)
            except HeadwaterError as error:
                self.forget(table)
                await self._stop(table, error)

    async def _heal(self, table: TableBackfill) -> None:
        table_id = table.table_id
        if table_id in self._lost:
            if table.failed:  # else its failure is not committed yet
                await table.copy_again(follow=False)
                self.forget(table)
        elif table_id in self._suspects:
            if table.failed or table.stopped:
                await self._try_shape(table, self._suspects[table_id])
        elif table_id in self._reshaped and not table.replacing:
            await self._reshape(table, self._reshaped[table_id])
        elif not table.failed and not table.replacing:
            await self._check_membership(table)

    async def _try_shape(self, table: TableBackfill, error: HeadwaterError) -> None:
        """Whether the table's columns have changed, and a copy with the new ones is allowed and begun."""
        if table.policy == "exception" or not await table.copy_again(follow=False, only_if_reshaped=True):
            self.forget(table)
            await self._stop(table, error)
            return
        self.forget(table)

    async def _reshape(self, table: TableBackfill, what: str) -> None:
        notice = SourceError(
            "SOURCE_SCHEMA_CHANGED",
            f"the source's table of {table.name} has changed: {what}",
            hint=f"it is copied again, as schema.change.behavior = {table.policy} says",
        )
        await table.copy_again(follow=not table.unfinished, only_if_reshaped=True, notice=notice)
        self.forget(table)

    async def _check_membership(self, table: TableBackfill) -> None:
        """The table is still in the publication under the entry with which it entered."""
        reader, entered = table.source.reader, table.entered
        if reader is None or not reader.knows_publication or not entered["membership"]:
            return
        if reader.membership(int(entered["oid"]), int(entered["schema_oid"] or 0)) == entered["membership"]:
            return
        # The reader looks once per heartbeat: it may not know of our own entry yet.
        if await asyncio.to_thread(table.present_membership) == entered["membership"]:
            self._later(table)
            return
        error = SourceError(
            "SOURCE_TABLE_UNPUBLISHED",
            f"publication {table.source.config.publication} was changed, or table {table.name} taken out of it",
            hint="changes made meanwhile were not sent; it is published again if we may, and copied again",
        )
        await table.copy_again(follow=False, notice=error)
        self._later(table)

    async def _check_catalogue(self, source: SourceRuntime) -> None:
        """The tables still have their names, keys and old rows, once per heartbeat: the stream does not say so.

        An entry of its own in the publication goes with a table; one for all tables, or for a schema, does not.
        """
        tables = [t for t in source.tables.values() if not t.dropped and not t.failed and not t.replacing]
        if not tables or time.monotonic() < self._catalogue_at.get(source.job_id, 0.0):
            return
        self._catalogue_at[source.job_id] = time.monotonic() + max(source.config.heartbeat_ms / 1000, LOOK_AGAIN_S)
        wanted = [(t.oid, *t.captured["external"]) for t in tables]
        try:
            found = await asyncio.to_thread(setup.present, source.config, wanted)
        except HeadwaterError:
            return  # the reader says what is wrong
        for table, (now, layout) in zip(tables, found, strict=True):
            if table.table_id in source.tables:
                await self._guarded(table, functools.partial(self._named, table, now.named_oid, now.name))
                await self._guarded(table, functools.partial(self._check_key, table, now))
                await self._guarded(table, functools.partial(self._laid_out, table, layout))

    async def _named(self, table: TableBackfill, oid: int | None, name_now: str | None) -> None:
        """`oid`: of the table that has the captured name; `name_now`: of the table that we follow."""
        if table.failed or table.replacing:
            return
        external = ".".join(table.captured["external"])
        if oid == table.oid:
            self._renamed.pop(table.table_id, None)
        elif oid is not None or name_now is None:
            error = SourceError(
                "SOURCE_TABLE_REPLACED",
                f"{external} is not the table that was captured: it was dropped or renamed"
                + (", and another one has its name" if oid else ""),
                hint="the one of that name is copied again" if oid else f"make it again, then RESYNC {table.name}",
            )
            if oid is not None:
                await table.copy_again(follow=False, notice=error)
            else:
                await self._stop(table, error)
        elif self._renamed.get(table.table_id) != name_now:
            self._renamed[table.table_id] = name_now
            notice = SourceError(
                "SOURCE_TABLE_RENAMED",
                f"the source's table {external} is called {name_now} now, and is followed on",
                hint=f"DROP and CREATE {table.name} FROM its new name: under the old one it cannot be read again",
            )
            self.core.record_error(table.table_id, table.name, notice, retrying=False)

    async def _check_key(self, table: TableBackfill, now: Present) -> None:
        """The key is the one that was captured: where it is the replica identity, the stream says so."""
        from headwater.connectors.postgres.shape import key_changed

        if table.failed or table.replacing or table.schema.multiset or now.named_oid != table.oid:
            return
        if now.replica_identity != "d" and sorted(now.key) != sorted(table.schema.key):
            error = key_changed(".".join(table.captured["external"]), now.key)
            await table.copy_again(follow=False, notice=error)

    async def _laid_out(self, table: TableBackfill, layout: Layout) -> None:
        """Old rows are still what they were when the table entered the stream, but for what events have said since."""
        from headwater.connectors.postgres.layout import Layout, compare_layouts, compare_partitions

        before = table.entered["layout"]
        if not before or table.failed or table.replacing:  # entered before layouts were remembered; by its name already
            return
        known = Layout.from_dict(before)
        self._tell_partitions(table, *compare_partitions(known, layout))
        taken = [p.name for p in table.plans if not p.absent]
        change = compare_layouts(known, layout, taken)
        if table.policy == "ignore":
            change = replace(change, replaced=())
        if not change:
            return
        error = SourceError(
            "SOURCE_SCHEMA_CHANGED",
            f"the source's table of {table.name} has changed: {change}",
            hint=f"it is copied again, as schema.change.behavior = {table.policy} says"
            if table.policy != "exception"
            else f"RESYNC {table.name} to take its new rows",
        )
        if table.policy == "exception":
            await self._stop(table, error)
        else:
            await table.copy_again(follow=not table.unfinished, notice=error)

    def _tell_partitions(self, table: TableBackfill, gone: list[str], come: list[str]) -> None:
        """Said and not healed: whoever drops old partitions may want their rows kept here, and the table is large."""
        parts = [f"partition {', '.join(names)} {what}" for names, what in ((gone, "went"), (come, "came")) if names]
        if self._partitions.get(table.table_id, []) == parts:
            return
        self._partitions[table.table_id] = parts
        if parts:
            notice = SourceError(
                "SOURCE_PARTITIONS_CHANGED",
                f"{' and '.join(parts)} with its rows, and no change in the stream says so: {table.name} is as before",
                hint=f"VERIFY {table.name} REPAIR, or RESYNC {table.name}, to be as the source again",
            )
            self.core.record_error(table.table_id, table.name, notice, retrying=False)

    async def _stop(self, table: TableBackfill, error: HeadwaterError, *, retrying: bool = False) -> None:
        contribution = Contribution()
        definite = error if isinstance(error, DefiniteError) else SourceError(error.code, error.message)
        self.core.job_failed(table.table_id, definite, contribution, retrying=retrying)
        await table.stop()
        await self.core.main.request(contribution=contribution)
        table.report(waiting_for=str(error))

    def _later(self, table: TableBackfill) -> None:
        self._not_before[table.table_id] = time.monotonic() + LOOK_AGAIN_S

    def forget(self, table: TableBackfill) -> None:
        """Whatever was found in the table: it is dealt with, or of before its newest copy."""
        for found in (self._reshaped, self._suspects, self._not_before):
            found.pop(table.table_id, None)
        self._lost.discard(table.table_id)
