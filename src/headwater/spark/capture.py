"""The task that turns a piece of the spool into segments of the captured tables: decode, judge, fill, fold, write."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from headwater.backfill.cdc.mark import Ranges, mark_cdc_chunk
from headwater.capture.spool import SpoolReader
from headwater.capture.spool_format import SpoolRange
from headwater.connectors.postgres.columns import decode_column
from headwater.connectors.postgres.pgoutput import COMMIT_END_LSN, ORDER, XID, Changes
from headwater.connectors.postgres.types import ColumnPlan
from headwater.errors import DefiniteError, HeadwaterError
from headwater.model.schema import OP, OP_UPSERT, SEQ, Schema
from headwater.spark.lookup import lookup_rows
from headwater.spark.multiset import net_changes
from headwater.spark.tasks import run_guarded
from headwater.spark.toast import (
    Events,
    Filling,
    Missing,
    Origin,
    Overtaken,
    Patch,
    read_again,
    unknown_value,
)
from headwater.storage.files import DataDir
from headwater.storage.segments import column_widths, newest_per_key, read_segments, write_segment

FLUSH_BYTES: Final = 64 << 20  # of decoded rows: a transaction larger than that becomes several segments
SHARED_BYTES: Final = 128 << 20  # of the spool that a task keeps for several tables
WIDTH_SEGMENTS: Final = 8  # whose footers tell how large the values of a column are
ORDER_STRIDE: Final = 1 << 34  # orders of one piece of the spool: two per frame, and a file has fewer frames than this


# What a mistake of ours looks like for some value of some table. It comes again with every try, so it must not hold the
# other tables up; want of memory, a lost file or connection may pass, and is not among these.
FAULTS: Final = (ValueError, TypeError, LookupError, ArithmeticError, AssertionError, NotImplementedError)


def fault(error: Exception) -> DefiniteError:
    """Stops one table. What the error says may hold a row's value: only its kind and place are told."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return DefiniteError(
        "DECODING_FAILED",
        f"the table's changes could not be decoded: {type(error).__name__}",
        detail=f"{Path(place.filename).name}, line {place.lineno}, in {place.name}",
        hint="a mistake of Headwater's: please report it. RESYNC takes the table as it is now",
    )


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """One table's part of the work. `bounds`: the splits' inner bounds, as the source's text; `after`: see mark.py.

    `snapshots`: of each split that is handed over now, what its read had seen; None for all others. `origin` and
    `patches`: for large values that neither the stream nor our table has (toast.py).
    """

    table_id: int
    oid: int
    schema: Schema
    plans: tuple[ColumnPlan, ...]
    bounds: tuple[tuple[str, ...], ...]
    after: tuple[int, ...]
    snapshots: tuple[str | None, ...]
    first_lsn: int
    segments: tuple[str, ...]
    seq_base: int
    policy: str = "lenient"
    follows: tuple[str, ...] | None = None
    """`policy` is schema.change.behavior; `follows` are columns that we leave out, None: others are ignored."""
    widens: bool = False
    """A wider type of the source's is taken over."""
    complete: bool = True
    """We hold every row that an event can be about; not so if only changes are captured."""
    origin: Origin | None = None
    patches: tuple[Patch, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """Some tables of one source in one epoch: all events of each in one task, so that their order is plain.

    `ahead`: what comes after the epoch, as far as the patches of some table had seen it.
    """

    data_dir: DataDir
    spool: str
    ranges: tuple[SpoolRange, ...]
    tables: tuple[DecodeSpec, ...]
    vnode_count: int
    ahead: tuple[SpoolRange, ...] = ()

    @property
    def subject(self) -> int:
        return self.tables[0].table_id

    def run(self) -> Iterator[dict[str, Any]]:
        self.data_dir.require_mark()  # before a spool that this host does not have is taken for one that is not there
        try:
            pieces = self._pieces(self.ranges)
        except DefiniteError as error:
            yield from ({"subject": table.table_id, "error": error.as_dict()} for table in self.tables)
            return
        for table in self.tables:
            yield from run_guarded(_OneTable(self, table, pieces))

    def _pieces(self, ranges: Sequence[SpoolRange]) -> Iterable[Any]:
        """The pieces, scanned; for all tables at once if they are small, else one after the other for each table."""
        pieces = _Pieces(self.spool, ranges)
        return list(pieces) if sum(r.size for r in ranges) <= SHARED_BYTES else pieces


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of the spool, read again by everybody who goes through them."""

    spool: str
    ranges: Sequence[SpoolRange]

    def __iter__(self) -> Iterator[Any]:
        from headwater.connectors.postgres.pgoutput import scan_frames

        reader = SpoolReader(self.spool)
        for piece in self.ranges:
            yield scan_frames(reader.read(piece)), reader.relations_at(piece)


@dataclass(frozen=True, slots=True)
class _OneTable:
    job: DecodeTables
    table: DecodeSpec
    pieces: Iterable[Any]
    reshaped: list[str] = field(default_factory=list)

    @property
    def subject(self) -> int:
        return self.table.table_id

    def run(self) -> Iterator[dict[str, Any]]:
        try:
            yield self._result()
        except FAULTS as error:
            if isinstance(error, pa.ArrowInvalid) and "Parquet" in str(error):
                raise  # a damaged file, which can be put back
            raise fault(error) from error

    def _result(self) -> dict[str, Any]:
        result: dict[str, Any] = {"subject": self.table.table_id, "captured": True}
        segments: list[dict[str, Any]] = []
        try:
            result |= {"truncate": self._write_all(segments), "segments": segments}
        except Missing as missing:
            result |= {"held": self._read_again(missing.keys), "abandoned": [s["path"] for s in segments]}
        except Overtaken:
            result |= {"held": {"overtaken": True}, "abandoned": [s["path"] for s in segments]}
        if self.reshaped:
            result["reshaped"] = self.reshaped[-1]
        return result

    def _write_all(self, segments: list[dict[str, Any]]) -> list[int] | None:
        """Write the events that pass, in order, after the last TRUNCATE; gives that one's position and transaction.

        Whatever a read had seen, nothing before a TRUNCATE counts: who sees it, sees all that it waited for.
        """
        truncate: list[int] | None = None
        parts: list[Events] = []
        widths: dict[str, float] = {}
        number = 0
        for batch, base in self._batches(self.pieces):
            last = -1
            if len(batch.truncates.order):
                last = int(batch.truncates.order[-1]) + base
                truncate = [int(batch.truncates.commit_end_lsn[-1]), int(batch.truncates.xid[-1])]
                parts = []
                segments.clear()  # their files are left over, and swept
            part = self._passing(batch, base, last)
            if part.unchanged and not widths:
                widths = self._widths(part.unchanged)
            # Values that a patch must give are followed over all events of the epoch.
            whole = self.table.patches and any(p.unchanged for p in (*parts, part))
            for piece in [part] if whole else part.pieces(widths, FLUSH_BYTES):
                if len(piece):
                    parts.append(piece)
                if sum(p.size(widths) for p in parts) > FLUSH_BYTES and not whole:
                    number += self._write(parts, number, segments)
                    parts = []
        if parts:
            self._write(parts, number, segments)
        return truncate

    def _write(self, parts: Sequence[Events], number: int, segments: list[dict[str, Any]]) -> int:
        """One segment of these events; `number`: how many the table had before them in this epoch."""
        table = self.table
        events = Events.joined(parts)
        written = [s["path"] for s in segments]
        if table.schema.multiset:
            rows = self._net(events.rows, written, number)
        else:
            seq = table.seq_base + number + np.arange(len(events), dtype=np.int64)
            rows = self._filled(events, written).append_column(SEQ, pa.array(seq))
            rows = newest_per_key(rows, table.schema.key)
        if rows.num_rows:
            vnodes = self.job.vnode_count
            segment = write_segment(
                self.job.data_dir, table.table_id, table.schema, rows, kind="delta", vnode_count=vnodes
            )
            segments.append(segment.as_dict())
        return len(events)

    def _net(self, rows: pa.Table, written: Sequence[str], number: int) -> pa.Table:
        return net_changes(
            rows,
            self.table.schema,
            data_dir=self.job.data_dir,
            segments=[*self.table.segments, *written],
            vnode_count=self.job.vnode_count,
            seq_base=self.table.seq_base + number,
            strict=self.table.complete,
        )

    def _batches(self, pieces: Iterable[Any]) -> Iterator[tuple[Any, int]]:
        """The table's events in batches of bounded size, each with what makes its order one of all pieces."""
        from headwater.connectors.postgres.pgoutput import WINDOW_BYTES, decode_events, layouts
        from headwater.connectors.postgres.shape import parse_relation

        for number, (frames, relations) in enumerate(pieces):
            initial = relations.get(self.table.oid)
            relation = parse_relation(initial) if initial is not None else self._first_relation(frames)
            if relation is None:
                continue
            for shape, start, last in layouts(frames, relation):
                first = start
                while first < last:
                    cut = int(np.searchsorted(frames.starts, frames.starts[first] + WINDOW_BYTES))
                    end = min(max(cut, first + 1), last)
                    batch = decode_events(
                        None,
                        shape,
                        self.table.plans,
                        frames=frames,
                        first=first,
                        last=end,
                        row_id=self.table.schema.multiset,
                        # Rows that are known by all of their content are others with a column less.
                        tolerant=self.table.policy != "exception" and not self.table.schema.multiset,
                        wanted=self._wanted(frames),
                    )
                    if len(batch):
                        self._judge(shape)
                    yield batch, number * ORDER_STRIDE
                    first = end

    def _wanted(self, frames: Any) -> Any:
        """Transactions of which an event can pass: what a read had seen may have a shape of before its time."""
        from headwater.connectors.postgres.planner import visible

        tx, snapshots = frames.transactions, set(self.table.snapshots)
        wanted = tx.commit_end_lsn.astype(np.int64) > min(self.table.after)
        if None not in snapshots:
            wanted &= ~np.logical_and.reduce([visible(s or "", tx.xid) for s in snapshots])
        return wanted

    def _judge(self, relation: Any) -> None:
        """A shape with events that is not the one we capture: stop, or let the engine know."""
        from headwater.connectors.postgres.shape import compare, shape_changed

        change = compare(relation, self.table.plans, self.table.follows)
        if (change or change.widened) and self.table.policy == "exception":
            raise shape_changed(relation, str(change), retyped=bool(change.retyped))
        keys = {p.name for p in self.table.plans if p.key_position is not None}  # these keep their type
        wider = self.table.widens and not keys.issuperset(change.widened)
        if (change and self.table.policy != "ignore") or wider:
            self.reshaped.append(str(change))

    def _first_relation(self, frames: Any) -> Any:
        from headwater.connectors.postgres.shape import parse_relation

        here = np.flatnonzero((frames.kinds == ord("R")) & (frames.relations == self.table.oid))
        return parse_relation(frames.message(int(here[0]))) if len(here) else None

    def _passing(self, batch: Any, base: int, truncated_at: int) -> Events:
        if self.table.schema.multiset:
            changes = Changes(batch.arrivals(), {}, batch.old)
        else:
            changes = batch.changes()
        rows, before = pa.Table.from_batches([changes.rows]), pa.Table.from_batches([changes.before])
        order = rows.column(ORDER).to_numpy() + base
        commit_end = rows.column(COMMIT_END_LSN).to_numpy()
        seen = self._seen(rows.column(XID).to_numpy())
        passes = mark_cdc_chunk(self._keys(rows), commit_end, self._ranges(), seen) & (order > truncated_at)
        keep = pa.array(np.flatnonzero(passes))
        rows = rows.set_column(rows.schema.get_field_index(ORDER), ORDER, pa.array(order)).take(keep)
        unchanged = {name: mask[passes] for name, mask in changes.unchanged.items() if mask[passes].any()}
        if self.table.schema.multiset:
            return Events(rows, rows, {}, np.ones(rows.num_rows, bool))
        known = np.ones(rows.num_rows, bool)
        if unchanged:
            # The row before is ours only if the event would pass under its key too: else that range is not handed over,
            # or its read had seen the event, and may have another row there.
            known = mark_cdc_chunk(self._keys(before), commit_end, self._ranges(), seen)[passes]
        return Events(rows, before.take(keep), unchanged, known)

    def _keys(self, rows: pa.Table) -> list[pa.Array]:
        return [rows.column(k).combine_chunks() for k in self.table.schema.key if k in rows.column_names]

    def _seen(self, xids: Any) -> dict[int, Any]:
        from headwater.connectors.postgres.planner import visible

        found = {s: visible(s, xids.astype(np.uint32)) for s in set(self.table.snapshots) if s is not None}
        return {i: found[s] for i, s in enumerate(self.table.snapshots) if s is not None}

    def _ranges(self) -> Ranges:
        table = self.table
        if not table.bounds:
            return Ranges((), table.after)
        plans = {p.name: p for p in table.plans}
        return Ranges(typed_bounds([plans[k] for k in table.schema.key], table.bounds), table.after)

    # -- unchanged TOAST --------------------------------------------------------------------------------------------

    def _filled(self, events: Events, written: Sequence[str]) -> pa.Table:
        """Put the values that the stream left out; Missing or Overtaken if that is not possible yet."""
        if not events.unchanged:
            return events.rows
        filling = Filling(events, self._ahead() if self.table.patches else None, self.table.schema.key)
        found = lookup_rows(
            self.job.data_dir,
            self.table.schema,
            [*self.table.segments, *written],
            filling.wanted(),
            self.job.vnode_count,
            [*self.table.schema.key, *filling.names],
        )
        patches = [(self._seen_by(p.snapshot, filling.xids), self._patch_rows(p, filling)) for p in self.table.patches]
        return filling.filled(found, patches)

    def _widths(self, names: Iterable[str]) -> dict[str, float]:
        """How many bytes a value of these columns has, on average, in what we hold."""
        some = self.table.segments[:: max(1, len(self.table.segments) // WIDTH_SEGMENTS)]
        return column_widths(self.job.data_dir, some, names)

    def _ahead(self) -> Events | None:
        parts = []
        for batch, _ in self._batches(self.job._pieces(self.job.ahead)):
            if len(batch.truncates.order):
                raise Overtaken
            changes = batch.changes()
            rows, before = pa.Table.from_batches([changes.rows]), pa.Table.from_batches([changes.before])
            parts.append(Events(rows, before, changes.unchanged, np.ones(rows.num_rows, bool)))
        return Events.joined(parts) if parts else None

    def _patch_rows(self, patch: Patch, filling: Filling) -> pa.Table:
        names = [*self.table.schema.key, *filling.names]
        return read_segments(self.job.data_dir, self.table.schema, [patch.path], names)

    def _seen_by(self, snapshot: str, xids: Any) -> Any:
        from headwater.connectors.postgres.planner import visible

        return visible(snapshot, xids.astype(np.uint32))

    def _read_again(self, keys: pa.Table) -> dict[str, Any]:
        """Read rows at the source for their large values, into a file of ours; the epoch is tried again with it."""
        from headwater.connectors.postgres.client import may_pass

        table = self.table
        if table.origin is None:
            raise unknown_value(next(p.name for p in table.plans if p.name not in table.schema.key))
        try:
            mark, rows = read_again(table.origin, table.plans, table.schema.key, keys)
        except HeadwaterError as error:
            if not may_pass(error):
                raise
            return {"error": error.as_dict()}
        rows = rows.append_column(OP, pa.array(np.full(rows.num_rows, OP_UPSERT, np.int8)))
        rows = rows.append_column(SEQ, pa.array(np.zeros(rows.num_rows, np.int64)))
        patch = write_segment(
            self.job.data_dir, table.table_id, table.schema, rows, kind="base", vnode_count=self.job.vnode_count
        )
        return {"path": patch.path, "snapshot": mark.low, "high": mark.high}


def typed_bounds(key: Sequence[ColumnPlan], bounds: Sequence[tuple[str, ...]]) -> tuple[tuple[Any, ...], ...]:
    """Bounds as values of the key's columns, from the source's text by the same decoder as rows."""
    typed = []
    for i, plan in enumerate(key):
        texts = [b[i].encode() for b in bounds]
        lengths = np.array([len(x) for x in texts], np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        typed.append(decode_column(plan, np.frombuffer(b"".join(texts), np.uint8), starts, lengths))
    return tuple(tuple(column[i] for column in typed) for i in range(len(bounds)))
