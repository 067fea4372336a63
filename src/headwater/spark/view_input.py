"""A view's inputs, and the view itself, as scans of segments: what the names in a refresh's text are bound to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pyspark.sql import Column, DataFrame

from headwater.model.schema import Schema, quoted
from headwater.runtime.tables import AnySegment, InputLog, TableState
from headwater.spark.compaction import foldable
from headwater.spark.lookup import LookUp
from headwater.spark.table import TableReader
from headwater.spark.view import Lasting, Source, bound_name
from headwater.view.inputs import Part, Parts, SegmentText, old_columns

# Up to this much, deltas are put together in one task and broadcast; beyond it a shuffle is cheaper than one slow task.
FEW_BYTES: Final = 48 * 1024 * 1024
# So few rows are read in a few milliseconds, less than a broadcast of the wanted keys takes.
TINY_ROWS: Final = 100_000
LOOKED_UP_ROWS: Final = 50_000  # changes that one task finds the old rows of in a fraction of a second


def segment_source(
    reader: TableReader,
    number: int | str,
    state: TableState,
    log: InputLog | None = None,
    changes_where: Column | None = None,
) -> Source:
    """An input with its change log, or a table as it is; `changes_where` takes only a part of the log for changed."""
    binding = _Scans(reader, bound_name(number))
    after = binding.parts("a", state.segments)
    before, changes, reset = after, Parts(None, None), False
    if log is not None and log.changed:
        before = binding.parts("b", log.seen)
        changes = _Scans(reader, bound_name(number), changes_where).parts_into("l", log.log, binding)
        reset = log.reset
        if changes_where is None and _looks_up(state.schema, log):
            text = SegmentText(binding.name, state.schema, before, after, changes, reset, looks_up=True)
            return Source(text, binding.frames, OldRows(reader, binding.name, log).asked)
    return Source(SegmentText(binding.name, state.schema, before, after, changes, reset), binding.frames)


def _looks_up(schema: Schema, log: InputLog) -> bool:
    """Whether tasks look the touched keys up: in a large table that costs less than to scan it for them."""
    if log.reset or not foldable(schema) or sum(s.rows for s in log.log) > LOOKED_UP_ROWS:
        return False
    return sum(s.rows for s in log.seen) > TINY_ROWS


@dataclass(frozen=True, slots=True)
class OldRows:
    """The rows that the touched keys of an input had before, found by one task."""

    reader: TableReader
    name: str
    log: InputLog

    def asked(self, name: str) -> Callable[[], DataFrame] | None:
        columns = old_columns(self.name, self.reader.schema, name)
        return None if columns is None else lambda: self._frame(columns)

    def _frame(self, columns: list[str]) -> DataFrame:
        schema = self.reader.schema
        log, seen = [s.path for s in self.log.log], [s.path for s in self.log.seen]
        look_up = LookUp(self.reader.data_dir, schema, tuple(log), tuple(seen), tuple(columns), self.reader.vnode_count)
        ddl = ", ".join(f"{quoted(c)} {schema[c].type}" for c in columns)
        return self.reader.spark.range(0, 1, numPartitions=1).mapInArrow(look_up, ddl)


class _Scans:
    """Names for lists of segments; equal lists have one name, so that Spark sees one scan."""

    def __init__(self, reader: TableReader, name: str, where: Column | None = None) -> None:
        self.reader = reader
        self.name = name
        self.where = where
        self.frames: dict[str, Callable[[], DataFrame]] = {}
        self._names: dict[tuple[str, ...], str] = {}

    def parts(self, version: str, segments: Sequence[AnySegment]) -> Parts:
        base = [s for s in segments if s.kind == "base"]
        delta = [s for s in segments if s.kind != "base"]
        parts = Parts(self._part(f"{version}b", base), self._part(f"{version}d", delta))
        if parts.base is None or parts.delta is None or not (parts.base.tiny and parts.delta.tiny):
            return parts
        return replace(parts, both=self._part(f"{version}a", [*base, *delta]))

    def parts_into(self, version: str, segments: Sequence[AnySegment], others: _Scans) -> Parts:
        """The parts of segments, bound among the others; with their names where the scans are the same."""
        if self.where is None:
            return others.parts(version, segments)
        parts = self.parts(version, segments)
        others.frames |= self.frames
        return parts

    def _part(self, suffix: str, segments: list[AnySegment]) -> Part | None:
        if not segments:
            return None
        paths = tuple(sorted(s.path for s in segments))
        name = self._names.setdefault(paths, f"{self.name}_{suffix}")
        self.frames.setdefault(name, self._frame(segments, paths))
        few = sum(s.bytes for s in segments) <= FEW_BYTES
        return Part(name, few, few and sum(s.rows for s in segments) <= TINY_ROWS)

    def _frame(self, segments: list[AnySegment], paths: tuple[str, ...]) -> Callable[[], DataFrame]:
        where = self.where
        if where is not None:
            return lambda: self.reader.scan(segments, where)
        return Lasting((self.reader.schema, paths), lambda: self.reader.scan(segments))
