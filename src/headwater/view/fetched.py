"""An input of which a refresh reads only what some values pick out: the text of a refresh that is run many times.

Nothing in the text says which files there are, so that it, and Spark's plan of it, stays the same from epoch to epoch.
`spark/fetch.py` reads the rows. Where all rows of a large input would be read, there is no such text (`NotFetched`).

    <name>_changes_<columns>   net changes                <name>_both_<columns>  with the old rows
    <name>_<version>_<columns> all rows of a small input   <name>_f<n>            rows for values (`Sql.fetch`)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from headwater.model.schema import OP, Schema
from headwater.view.inputs import Version
from headwater.view.relations import Rel, Sql

Part = Literal["changes", "both", "before", "after"]


class NotFetched(Exception):
    """A refresh that would have to read all of a large input."""


@dataclass(frozen=True, slots=True)
class FetchedText:
    """See the head of this module; the methods are those of `InputText`."""

    name: str
    schema: Schema
    changed: bool
    tiny: bool
    fetched: bool = True

    @property
    def shape(self) -> Hashable:
        return self

    def rows(self, sql: Sql, version: Version, columns: Sequence[str]) -> Rel:
        if not self.tiny:
            raise NotFetched(f"all rows of {self.name}")
        return self._given(sql, version, columns)

    def lookup(self, sql: Sql, version: Version, columns: Sequence[str], keys: Rel) -> Rel:
        return self.matching(sql, version, columns, self.schema.key, keys)

    def matching(self, sql: Sql, version: Version, columns: Sequence[str], match: Sequence[str], keys: Rel) -> Rel:
        return sql.fetch(self.name, version, columns, match, keys)

    def changes(self, sql: Sql, columns: Sequence[str]) -> Rel:
        return self._given(sql, "changes", columns)

    def changes_with_old(self, sql: Sql, columns: Sequence[str]) -> Rel:
        return self._given(sql, "both", columns)

    def _given(self, sql: Sql, part: Part, columns: Sequence[str]) -> Rel:
        positions = "".join(f"_{self.schema.names.index(c)}" for c in columns)
        return sql.given(f"{self.name}_{part}{positions}", (*columns, OP) if part in ("changes", "both") else columns)

    def asked(self, name: str) -> tuple[Part, list[str]] | None:
        """What is bound under a name: the part, and its columns; None for a name of others."""
        for part in ("changes", "both", "before", "after"):
            prefix = f"{self.name}_{part}_"
            if name.startswith(prefix):
                return part, [self.schema.names[int(i)] for i in name.removeprefix(prefix).split("_")]
        return None
