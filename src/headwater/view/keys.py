"""Keys of view rows as text, and the comparison of recomputed rows with the stored ones, as SQL text.

Canonical text of columns: each value as `length:text`, NULL as `N`, one after the other; so no two lists of values
share a text. It does not depend on the session: instants are microseconds, binary is hex, and -0.0 is 0.0 in a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headwater.model.schema import OP, OP_DELETE, OP_UPSERT, VIEW_KEY, quoted
from headwater.view.relations import Rel, Sql, Types, literal

_JSON: Final = (
    "map('timestampFormat', 'yyyy-MM-dd\\'T\\'HH:mm:ss.SSSSSSXXX', "
    "'timestampNTZFormat', 'yyyy-MM-dd\\'T\\'HH:mm:ss.SSSSSS', 'timeZone', 'UTC', 'ignoreNullFields', 'false')"
)
_HASH_HEX_DIGITS: Final = 40  # 160 bits of SHA-256: no two rows of a view will ever share it
_EMPTY: Final = "()"  # the text of no columns at all: the key of a single row
_NESTED: Final = ("array<", "struct<", "map<")
_FLOATS: Final = ("float", "double")


def _text(column: str, kind: str, *, normalise: bool) -> str:
    if kind in _FLOATS:
        return f"CAST({_without_negative_zeros(column, kind) if normalise else column} AS STRING)"
    if kind == "timestamp":
        return f"CAST(unix_micros({column}) AS STRING)"
    if kind == "binary":
        return f"hex({column})"
    if kind.startswith(_NESTED):
        value = _without_negative_zeros(column, kind) if normalise else column
        return f"CASE WHEN {column} IS NOT NULL THEN to_json(named_struct('v', {value}), {_JSON}) END"
    return column if kind == "string" else f"CAST({column} AS STRING)"


def _without_negative_zeros(value: str, kind: str, depth: int = 0) -> str:
    """A value with 0.0 for each -0.0 in it, as Spark takes them when it groups."""
    if not any(name in kind for name in _FLOATS):
        return value
    if kind in _FLOATS:
        return f"CASE WHEN {value} = CAST(0 AS {kind}) THEN CAST(0 AS {kind}) ELSE {value} END"
    if kind.startswith("array<"):
        item = f"hw_x{depth}"
        return f"transform({value}, {item} -> {_without_negative_zeros(item, kind[6:-1], depth + 1)})"
    if kind.startswith("struct<"):
        fields = [part.split(":", 1) for part in _split(kind[7:-1])]
        parts = (
            f"{literal(name)}, {_without_negative_zeros(f'{value}.{quoted(name)}', inner, depth)}"
            for name, inner in fields
        )
        return f"CASE WHEN {value} IS NOT NULL THEN named_struct({', '.join(parts)}) END"
    return value


def _split(fields: str) -> list[str]:
    """The fields of a struct's type: its commas that are in no inner type."""
    parts, depth = [""], 0
    for character in fields:
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def canonical(types: Types, columns: Sequence[str], *, normalise: bool = True) -> str:
    """The canonical text of columns, as an expression."""
    parts = []
    for name in columns:
        text = _text(quoted(name), types[name], normalise=normalise)
        parts.append(f"coalesce(concat(CAST(length({text}) AS STRING), ':', {text}), 'N')")
    return f"concat({', '.join(parts)})" if parts else literal(_EMPTY)


def occurrence_key(sql: Sql, rel: Rel, part: str, columns: Sequence[str]) -> Rel:
    """`_key` for rows that no columns identify: partition, hash of the content, number among equal rows."""
    content = canonical(sql.types(rel), columns, normalise=False)
    hashed = sql.extend(rel, {"_hw_part": part, "_hw_hash": f"substring(sha2({content}, 256), 1, {_HASH_HEX_DIGITS})"})
    number = "CAST(row_number() OVER (PARTITION BY _hw_part, _hw_hash ORDER BY NULL) AS STRING)"
    key = {VIEW_KEY: f"concat_ws('|', _hw_part, _hw_hash, {number})"}
    return sql.select(hashed, {**{c: quoted(c) for c in rel.columns}, **key})


def _same(name: str, kind: str) -> str:
    left, right = f"_hw_new.{quoted(name)}", f"_hw_old.{quoted(name)}"
    if kind in _FLOATS:
        # = takes -0.0 and 0.0 for equal; a fresh query shows which of them it is.
        return f"CAST({left} AS STRING) <=> CAST({right} AS STRING)"
    if kind.startswith(_NESTED):
        return f"to_json(named_struct('v', {left}), {_JSON}) <=> to_json(named_struct('v', {right}), {_JSON})"
    return f"{left} <=> {right}"


def difference(sql: Sql, new: Rel, old: Rel, columns: Sequence[str]) -> Rel:
    """What turns the old rows into the new ones: `columns` (with `_key` among them) and `_op`, one row per `_key`."""
    types = sql.types(new)
    struct = f"named_struct({', '.join(f'{literal(c)}, {quoted(c)}' for c in columns)})"
    left = sql.select(new, {"_hw_new_key": VIEW_KEY, "_hw_new": struct})
    right = sql.select(old, {"_hw_old_key": VIEW_KEY, "_hw_old": struct})
    joined = sql.join(left, right, "_hw_new_key = _hw_old_key", "full")
    same = " AND ".join(_same(name, types[name]) for name in columns)
    changed = sql.where(joined, f"_hw_new_key IS NULL OR _hw_old_key IS NULL OR NOT ({same})")
    outputs = {name: f"_hw_new.{quoted(name)}" for name in columns if name != VIEW_KEY}
    outputs[VIEW_KEY] = "coalesce(_hw_new_key, _hw_old_key)"
    outputs[OP] = f"CAST(CASE WHEN _hw_new_key IS NULL THEN {OP_DELETE} ELSE {OP_UPSERT} END AS TINYINT)"
    return sql.select(changed, outputs)
