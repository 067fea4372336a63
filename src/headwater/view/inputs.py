"""What a refresh reads of one input, as SQL text over relations that the caller binds by name.

An input is seen over an epoch range (E1, E2]: its rows before and after it, and the changes between. `SegmentText` puts
these together from scans of segments (`spark/view_input.py` binds the scans); `FrameText` takes them as they are.

    snapshot = base rows whose key no delta touches  ∪  newest delta row per key, unless it is a delete
    look-up  = of the base rows and the delta rows of some keys the newest per key, unless it is a delete

Keys that are known are looked up: what is left after a semi join with them is little, whatever the deltas hold.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, SEQ, Schema, quoted
from headwater.view.relations import Rel, Sql

Version = Literal["before", "after"]
_OLD, _NEW = "_hw_old", "_hw_new"  # what the versions of a touched key are called
_NUMBERS = {"TINYINT", "SMALLINT", "INT", "INTEGER", "BIGINT", "FLOAT", "REAL", "DOUBLE", "DECIMAL"}
_FIXED_WIDTH = frozenset({"BOOLEAN", "DATE", "TIMESTAMP", "TIMESTAMP_NTZ"} | _NUMBERS)
_FEW_COLUMNS = 16  # an aggregate for each of more of them takes longer to plan than sorting them takes
_UPSERT = f"CAST({OP_UPSERT} AS TINYINT)"
_DELETE = f"CAST({OP_DELETE} AS TINYINT)"


class InputText(Protocol):
    """One input of a view. `columns` are those that are wanted, the key columns always among them.

    name                what its names in the text begin with
    rows(version)       the rows at E1 or E2
    tiny                whether there are so few of them that they are better read than looked up
    fetched             whether rows are only had by values, unless it is tiny: then `matching` is asked for them
    lookup(version)     those of them whose key is among `keys` (a relation of the key columns, in order, other names)
    matching(version)   those of them whose columns `match` have values that are among `keys` (NULL is a value)
    changes()           one row per key touched in between, and `_op`; of a delete only the key counts
    changes_with_old()  rows with `_op` 1 (new) and 2 (old, complete); an update is both
    changed             False promises that there are no changes: then only rows after are asked for
    shape               everything that the texts depend on: equal shapes give equal texts
    """

    @property
    def name(self) -> str: ...
    @property
    def schema(self) -> Schema: ...
    @property
    def changed(self) -> bool: ...
    @property
    def tiny(self) -> bool: ...
    @property
    def fetched(self) -> bool: ...
    @property
    def shape(self) -> Hashable: ...
    def rows(self, sql: Sql, version: Version, columns: Sequence[str]) -> Rel: ...
    def lookup(self, sql: Sql, version: Version, columns: Sequence[str], keys: Rel) -> Rel: ...
    def matching(self, sql: Sql, version: Version, columns: Sequence[str], match: Sequence[str], keys: Rel) -> Rel: ...
    def changes(self, sql: Sql, columns: Sequence[str]) -> Rel: ...
    def changes_with_old(self, sql: Sql, columns: Sequence[str]) -> Rel: ...


def semi_by_value(sql: Sql, rows: Rel, match: Sequence[str], keys: Rel) -> Rel:
    """The rows whose columns have values among the keys, which are in order and have other names; NULL is a value."""
    terms = (f"{quoted(c)} <=> {quoted(name)}" for c, name in zip(match, keys.columns, strict=True))
    return sql.join(rows, keys, " AND ".join(terms), "semi")


def semi_by_key(sql: Sql, rows: Rel, key: Sequence[str], keys: Rel) -> Rel:
    """The rows whose key is among the keys, which are in order and have other names."""
    terms = (f"{quoted(k)} = {quoted(name)}" for k, name in zip(key, keys.columns, strict=True))
    return sql.join(rows, keys, " AND ".join(terms), "semi")


@dataclass(frozen=True, slots=True)
class FrameText:
    """An input whose versions and changes are bound as they are, by the names `<name>_after` and so on."""

    name: str
    schema: Schema
    changed: bool
    tiny: bool = False
    fetched: bool = False

    @property
    def shape(self) -> Hashable:
        return self

    def rows(self, sql: Sql, version: Version, columns: Sequence[str]) -> Rel:
        return sql.keep(sql.given(f"{self.name}_{version}", self.schema.names), columns)

    def lookup(self, sql: Sql, version: Version, columns: Sequence[str], keys: Rel) -> Rel:
        return semi_by_key(sql, self.rows(sql, version, columns), self.schema.key, keys)

    def matching(self, sql: Sql, version: Version, columns: Sequence[str], match: Sequence[str], keys: Rel) -> Rel:
        return semi_by_value(sql, self.rows(sql, version, columns), match, keys)

    def changes(self, sql: Sql, columns: Sequence[str]) -> Rel:
        return sql.keep(sql.given(f"{self.name}_changes", (*self.schema.names, OP)), [*columns, OP])

    def changes_with_old(self, sql: Sql, columns: Sequence[str]) -> Rel:
        return sql.keep(sql.given(f"{self.name}_changes_with_old", (*self.schema.names, OP)), [*columns, OP])


def old_name(input_name: str, schema: Schema, columns: Sequence[str]) -> str:
    """Under which name the rows before of an input's touched keys are bound, with these columns."""
    return f"{input_name}_old" + "".join(f"_{schema.names.index(c)}" for c in columns)


def old_columns(input_name: str, schema: Schema, name: str) -> list[str] | None:
    """The columns that are wanted under a name; None if it is not one of `old_name`."""
    prefix = f"{input_name}_old_"
    return [schema.names[int(i)] for i in name.removeprefix(prefix).split("_")] if name.startswith(prefix) else None


@dataclass(frozen=True, slots=True)
class Part:
    """Segments of one kind: the name under which their scan is bound, and whether a task can hold them all.

    `tiny` says that reading all rows costs less than finding out which of them are wanted.
    """

    name: str
    few: bool
    tiny: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """The base and the deltas of a version, or of a change log; None where there are no segments.

    `both` is one scan of base and deltas, where both are tiny: each scan costs Spark more than so few rows. The rows of
    a base have `_seq` 0, so they are the oldest there too.
    """

    base: Part | None
    delta: Part | None
    both: Part | None = None


@dataclass(frozen=True, slots=True)
class SegmentText:
    """An input that is kept in segments. `reset` says that its log does not tell the change (TRUNCATE, a resync).

    `looks_up`: the rows before of the touched keys are bound too, under a name for each choice of columns (`old_name`).
    """

    name: str
    schema: Schema
    before: Parts
    after: Parts
    log: Parts
    reset: bool = False
    looks_up: bool = False
    fetched: bool = False

    @property
    def changed(self) -> bool:
        return self.reset or self.log.base is not None or self.log.delta is not None

    @property
    def tiny(self) -> bool:
        return all(part is None or part.tiny for part in (self.after.base, self.after.delta))

    @property
    def shape(self) -> Hashable:
        return self

    def rows(self, sql: Sql, version: Version, columns: Sequence[str]) -> Rel:
        parts = self.after if version == "after" else self.before
        if parts.delta is None:
            return sql.keep(self._scan(sql, parts.base), columns)
        if parts.both is not None:
            return sql.keep(sql.where(self._net(sql, parts.both, columns), f"{OP} = {OP_UPSERT}"), columns)
        live = sql.keep(sql.where(self._net(sql, parts.delta, columns), f"{OP} = {OP_UPSERT}"), columns)
        if parts.base is None:
            return live
        return sql.union([sql.keep(self._untouched(sql, parts.base, parts.delta), columns), live])

    def lookup(self, sql: Sql, version: Version, columns: Sequence[str], keys: Rel) -> Rel:
        parts = self.after if version == "after" else self.before
        if parts.delta is None or (parts.both is not None and sql.one_task):
            return semi_by_key(sql, self.rows(sql, version, columns), self.schema.key, keys)
        found = [
            semi_by_key(sql, self._ranked(sql, part, columns), self.schema.key, keys)
            for part in (parts.base, parts.delta)
            if part is not None
        ]
        newest = self._newest(sql, sql.union(found), columns)
        return sql.keep(sql.where(newest, f"{OP} = {OP_UPSERT}"), columns)

    def matching(self, sql: Sql, version: Version, columns: Sequence[str], match: Sequence[str], keys: Rel) -> Rel:
        return semi_by_value(sql, self.rows(sql, version, columns), match, keys)

    def changes(self, sql: Sql, columns: Sequence[str]) -> Rel:
        if self.reset:
            return self._replaced(sql, columns)
        found = [p for p in (self.log.base, self.log.delta) if p is not None]
        if len(found) == 1 and found[0] is self.log.base:
            return sql.keep(self._ranked(sql, found[0], columns), [*columns, OP])
        if len(found) == 1:
            return self._net(sql, found[0], columns)
        return self._newest(sql, sql.union([self._ranked(sql, p, columns) for p in found]), columns)

    def changes_with_old(self, sql: Sql, columns: Sequence[str]) -> Rel:
        if self.reset:
            return self._both(sql, columns)
        if self.before.base is None and self.before.delta is None:
            return sql.where(self.changes(sql, columns), f"{OP} = {OP_UPSERT}")
        return self._images(sql, self._both_versions(sql, columns), columns)

    def _both_versions(self, sql: Sql, columns: Sequence[str]) -> Rel:
        """Per touched key the old and the new values, in one aggregation; NULL where there was or is none."""
        logs = [p for p in (self.log.base, self.log.delta) if p is not None]
        found = [sql.extend(self._ranked(sql, p, columns), {"_hw_is_new": "true"}) for p in logs]
        found += self._rows_before(sql, logs, columns)
        versions: dict[str, str] = {}
        for side, which in ((_OLD, "NOT _hw_is_new"), (_NEW, "_hw_is_new")):
            newest = self._newest_values([*self._beside_key(columns), OP], f" FILTER (WHERE {which})")
            versions |= {f"{side}{name}": text for name, text in newest.items()}
        grouped = sql.group(sql.union(found), self.schema.key, versions)
        there = self._of_newest(OP, columns, _NEW)
        # Looked-up rows may be more than those of the touched keys, and in one task all rows are read.
        return sql.where(grouped, f"{there} IS NOT NULL") if sql.one_task or self.looks_up else grouped

    def _rows_before(self, sql: Sql, logs: Sequence[Part], columns: Sequence[str]) -> list[Rel]:
        """What the touched keys were before, in every version that is left of it; in one task: all keys."""
        old = [p for p in (self.before.base, self.before.delta) if p is not None]
        if sql.one_task:
            # All are read, and those that nobody touched left out afterwards: a join costs Spark more.
            old = [self.before.both] if self.before.both is not None else old
            return [sql.extend(self._ranked(sql, p, columns), {"_hw_is_new": "false"}) for p in old]
        if self.looks_up:
            marks = {OP: _UPSERT, SEQ: "CAST(-1 AS BIGINT)", "_hw_is_new": "false"}
            bound = sql.given(old_name(self.name, self.schema, columns), ())
            return [sql.select(bound, {**{c: quoted(c) for c in columns}, **marks})]
        touched = [sql.select(sql.given(p.name, ()), {f"_hw_{k}": quoted(k) for k in self.schema.key}) for p in logs]
        keys = sql.union(touched)
        keys = keys.few() if all(p.few for p in logs) else keys
        rows = [semi_by_key(sql, self._ranked(sql, part, columns), self.schema.key, keys) for part in old]
        return [sql.extend(part, {"_hw_is_new": "false"}) for part in rows]

    def _images(self, sql: Sql, versions: Rel, columns: Sequence[str]) -> Rel:
        """One row per image: the old one as a delete, the new one as an upsert."""
        sides = []
        for side, op in ((_OLD, _DELETE), (_NEW, _UPSERT)):
            named = [f"{self._of_newest(c, columns, side)} AS {quoted(c)}" for c in columns]
            values = ", ".join([*named, f"{op} AS {OP}"])
            sides.append(f"CASE WHEN {self._of_newest(OP, columns, side)} = {OP_UPSERT} THEN struct({values}) END")
        image = sql.select(versions, {"_hw_image": f"explode(array({', '.join(sides)}))"})
        there = sql.where(image, "_hw_image IS NOT NULL")
        return sql.select(there, {c: f"_hw_image.{quoted(c)}" for c in (*columns, OP)})

    # -- pieces

    def _scan(self, sql: Sql, part: Part | None) -> Rel:
        if part is not None:
            return sql.given(part.name, self.schema.names)
        nulls = ", ".join(f"CAST(NULL AS {c.type}) AS {quoted(c.name)}" for c in self.schema.columns)
        return sql.add(f"SELECT {nulls} WHERE false", self.schema.names)

    def _ranked(self, sql: Sql, part: Part, columns: Sequence[str]) -> Rel:
        """Rows with `_op` and `_seq`; what is in a base is older than any delta."""
        base = part in (self.before.base, self.after.base, self.log.base)
        marks = {OP: _UPSERT, SEQ: "CAST(-1 AS BIGINT)"} if base else {OP: OP, SEQ: SEQ}
        return sql.select(sql.given(part.name, ()), {**{c: quoted(c) for c in columns}, **marks})

    def _net(self, sql: Sql, part: Part, columns: Sequence[str]) -> Rel:
        """The newest row per key of deltas; few of them are put together in one task, without a shuffle."""
        rows = self._ranked(sql, part, columns)
        if part.few:
            rows = sql.add(f"SELECT /*+ COALESCE(1) */ * FROM {rows.name}", rows.columns)
        return self._newest(sql, rows, columns)

    def _newest(self, sql: Sql, rows: Rel, columns: Sequence[str]) -> Rel:
        newest = self._newest_values([*self._beside_key(columns), OP])
        grouped = sql.group(rows, self.schema.key, {f"{_NEW}{name}": text for name, text in newest.items()})
        return sql.select(grouped, {c: self._of_newest(c, columns, _NEW) for c in (*columns, OP)})

    def _beside_key(self, columns: Sequence[str]) -> list[str]:
        return [c for c in columns if c not in self.schema.key]

    def _fixed(self, columns: Sequence[str]) -> bool:
        """Whether Spark can overwrite the values of these columns in place: then it aggregates them by hashing.

        Others it would have to sort; as one value, so that it is at least done once.
        """
        beside = self._beside_key(columns)
        types = (self.schema[c].type.upper().partition("(")[0].strip() for c in beside)
        return len(beside) <= _FEW_COLUMNS and _FIXED_WIDTH.issuperset(types)

    def _newest_values(self, columns: Sequence[str], condition: str = "") -> dict[str, str]:
        """The aggregates that give the values with the highest `_seq`, by name: each alone, or all as one struct."""
        if self._fixed([c for c in columns if c != OP]):
            return {f"_{c}": f"max_by({quoted(c)}, {SEQ}){condition}" for c in columns}
        return {"": f"max_by(struct({', '.join(map(quoted, columns))}), {SEQ}){condition}"}

    def _of_newest(self, column: str, columns: Sequence[str], side: str) -> str:
        """A column out of what `_newest_values` gave under the names of a side."""
        if column in self.schema.key:
            return quoted(column)
        return quoted(f"{side}_{column}") if self._fixed(columns) else f"{side}.{quoted(column)}"

    def _untouched(self, sql: Sql, base: Part, delta: Part) -> Rel:
        keys = sql.select(sql.given(delta.name, ()), {f"_hw_{k}": quoted(k) for k in self.schema.key})
        terms = (f"{quoted(k)} = {quoted(f'_hw_{k}')}" for k in self.schema.key)
        return sql.join(self._scan(sql, base), keys.few() if delta.few else keys, " AND ".join(terms), "anti")

    def _both(self, sql: Sql, columns: Sequence[str]) -> Rel:
        before, after = self.rows(sql, "before", columns), self.rows(sql, "after", columns)
        gone = sql.extend(sql.set_operation(before, after, "EXCEPT ALL"), {OP: _DELETE})
        return sql.union([gone, sql.extend(sql.set_operation(after, before, "EXCEPT ALL"), {OP: _UPSERT})])

    def _replaced(self, sql: Sql, columns: Sequence[str]) -> Rel:
        both = self._both(sql, columns)
        new = sql.where(both, f"{OP} = {OP_UPSERT}")
        keys = sql.select(new, {f"_hw_{k}": quoted(k) for k in self.schema.key})
        terms = (f"{quoted(k)} = {quoted(f'_hw_{k}')}" for k in self.schema.key)
        gone = sql.join(sql.where(both, f"{OP} = {OP_DELETE}"), keys, " AND ".join(terms), "anti")
        return sql.union([new, gone])
