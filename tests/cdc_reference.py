"""An independent witness of a Postgres source for tests: its own slot, its own small decoder of pgoutput, plain dicts.

Nothing of Headwater's is used, so that an error there cannot hide here.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg

Row = dict[str, str | None]
Key = tuple[str | None, ...]
UNCHANGED = object()


def digest(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


@dataclass
class Relation:
    name: str
    columns: list[tuple[str, bool]]


@dataclass
class ReferenceReplica:
    """Replays a slot onto empty tables. Make it before anything is written; long values are kept as their digest."""

    connect: Callable[[], psycopg.Connection[Any]]
    tables: list[str]
    long_columns: frozenset[str] = frozenset()
    slot: str = "witness"
    state: dict[str, dict[Key, Row]] = field(default_factory=dict)
    transactions: int = 0
    _relations: dict[int, Relation] = field(default_factory=dict)
    _messages: list[bytes] = field(default_factory=list)
    _at: int = 0

    def watch(self) -> None:
        names = ", ".join(self.tables)
        with self.connect() as connection:
            connection.execute(f"CREATE PUBLICATION {self.slot} FOR TABLE {names}".encode())
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (self.slot,))
        self.state = {name: {} for name in self.tables}

    def collect(self) -> None:
        """Fetch everything that is committed by now."""
        with self.connect() as connection:
            rows = connection.execute(
                "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1', "
                "'publication_names', %s)",
                (self.slot, self.slot),
            )
            self._messages += [bytes(r[0]) for r in rows]

    def advance(self, position: int) -> None:
        """Apply all transactions whose commit record ends at or before the position."""
        while self._at < len(self._messages):
            end = self._at
            while self._messages[end][:1] != b"C":
                end += 1
            (end_lsn,) = struct.unpack_from("!Q", self._messages[end], 10)
            if end_lsn > position:
                return
            for message in self._messages[self._at : end]:
                self._apply(message)
            self._at = end + 1
            self.transactions += 1

    def _apply(self, message: bytes) -> None:
        match message[:1]:
            case b"R":
                self._relation(message)
            case b"T":
                count, _ = struct.unpack_from("!IB", message, 1)
                for oid in struct.unpack_from(f"!{count}I", message, 6):
                    self.state[self._relations[oid].name].clear()
            case b"I" | b"U" | b"D":
                relation = self._relations[struct.unpack_from("!I", message, 1)[0]]
                tuples = dict(self._tuples(message, relation))
                self._change(relation, tuples)

    def _change(self, relation: Relation, tuples: dict[str, dict[str, Any]]) -> None:
        table = self.state[relation.name]
        old, new = tuples.get("K") or tuples.get("O"), tuples.get("N")
        if new is None:
            assert old is not None
            del table[self._key(relation, old)]  # a KeyError here is an error of the test itself
            return
        before = table.pop(self._key(relation, old), None) if old else table.get(self._key(relation, new))
        for name, value in new.items():
            if value is UNCHANGED:
                assert before is not None
                new[name] = before[name]
        table[self._key(relation, new)] = new

    def _key(self, relation: Relation, row: dict[str, Any]) -> Key:
        return tuple(row[name] for name, key in relation.columns if key)

    def _relation(self, message: bytes) -> None:
        (oid,) = struct.unpack_from("!I", message, 1)
        at = message.index(0, 5) + 1
        end = message.index(0, at)
        name = message[at:end].decode()
        (count,) = struct.unpack_from("!H", message, end + 2)
        at, columns = end + 4, []
        for _ in range(count):
            end = message.index(0, at + 1)
            columns.append((message[at + 1 : end].decode(), bool(message[at] & 1)))
            at = end + 9
        self._relations[oid] = Relation(name, columns)

    def _tuples(self, message: bytes, relation: Relation) -> Iterator[tuple[str, dict[str, Any]]]:
        at = 5
        while at < len(message):
            kind = chr(message[at])
            (count,) = struct.unpack_from("!H", message, at + 1)
            at += 3
            row: dict[str, Any] = {}
            for i in range(count):
                name = relation.columns[i][0]
                mark, at = message[at : at + 1], at + 1
                if mark == b"t":
                    (size,) = struct.unpack_from("!I", message, at)
                    text = message[at + 4 : at + 4 + size].decode()
                    row[name] = digest(text) if name in self.long_columns else text
                    at += 4 + size
                else:
                    row[name] = None if mark == b"n" else UNCHANGED
            yield kind, row


def parse_lsn(text: str) -> int:
    high, low = text.split("/")
    return int(high, 16) << 32 | int(low, 16)
