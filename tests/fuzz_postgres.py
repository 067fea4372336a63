"""Damaged frames for every decoder of what a Postgres server sends, with each access to an array checked.

    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=… python tests/fuzz_postgres.py SEED SECONDS

Run by `tests/property/test_postgres_malformed.py`. A valid message is made, then damaged: bytes flipped, lengths set to
what they cannot be, ends cut off. A decoder may decode it or refuse it, with an error of Headwater's (or the server's
own, of psycopg); an access beyond an array is an IndexError, and anything but a refusal ends the run with the seed.
"""

from __future__ import annotations

import contextlib
import random
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psycopg
from numba import config

from headwater.connectors.postgres import backlog
from headwater.connectors.postgres.columns import decode_column
from headwater.connectors.postgres.copytext import decode_copy
from headwater.connectors.postgres.history import History
from headwater.connectors.postgres.pgoutput import (
    StreamScanner,
    decode_events,
    decode_range,
    scan_frames,
    spool_frame,
)
from headwater.connectors.postgres.replication import Assembler, DoneStreaming
from headwater.connectors.postgres.rowreader import Messages, _RawRows, _strip_frames
from headwater.connectors.postgres.rowscan import find_messages
from headwater.connectors.postgres.shape import parse_relation
from headwater.connectors.postgres.types import NUMERIC_OID, ColumnPlan, PgColumn, column_plan
from headwater.connectors.postgres.wirerows import RowDecoder, WireRows, forms
from headwater.errors import HeadwaterError

LENGTHS = (-(1 << 31), -2, -1, 0, 1, 2, 3, 4, 5, 1 << 16, 1 << 30, (1 << 30) + 1, (1 << 31) - 1)
OID = 5
WARM = 30  # rounds


def _typed(number: int, oid: int, typmod: int = -1, element: int = 0) -> PgColumn:
    inner = PgColumn("", 0, element) if element else None
    return PgColumn(f"c{number}", number, oid, typmod, element=inner)


def _numeric(precision: int, scale: int) -> int:
    return ((precision << 16) | scale) + 4


TYPES = [(oid, -1, 0) for oid in (16, 17, 20, 21, 23, 26, 700, 701, 1082, 1114, 1184, 25, 2950, 3802, NUMERIC_OID)]
TYPES += [(NUMERIC_OID, _numeric(10, 2), 0), (NUMERIC_OID, _numeric(30, 4), 0), (1007, -1, 23), (1009, -1, 25)]
COLUMNS = [_typed(i, *kind) for i, kind in enumerate(TYPES, 1)]
PLANS = tuple(column_plan(c) for c in COLUMNS)
FLAT = tuple(p for p in PLANS if p.element is None)  # arrays have no binary form
TEXTS = {
    16: (b"t", b"f"),
    17: (b"\\x", b"\\x00ff10"),
    20: (b"-9223372036854775808", b"7"),
    21: (b"-32768", b"12"),
    23: (b"2147483647", b"-1"),
    26: (b"4294967295", b"0"),
    700: (b"1.5", b"NaN"),
    701: (b"-0.1", b"Infinity"),
    1082: (b"2026-11-18", b"infinity", b"0044-03-15 BC"),
    1114: (b"2026-11-18 10:00:00.123456", b"-infinity"),
    1184: (b"2026-11-18 10:00:00+00", b"0044-03-15 10:00:00+05:30:10 BC"),
    25: (b"", b"text \xc3\xa9", b"x" * 40),
    2950: (b"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",),
    3802: (b'{"k": 1}', b"null"),
    NUMERIC_OID: (b"12345.67", b"0", b"-1.5"),
    1007: (b"{1,NULL,-3}", b"{}"),
    1009: (b'{a,"b,\\"c",NULL}', b'{""}'),
}
BINARY = {
    16: (b"\1", b"\0"),
    17: (b"", b"\0\xff"),
    20: (struct.pack("!q", -7),),
    21: (struct.pack("!h", -7),),
    23: (struct.pack("!i", 7),),
    26: (struct.pack("!I", 1 << 31),),
    700: (struct.pack("!f", 1.5),),
    701: (struct.pack("!d", 1.5),),
    1082: (struct.pack("!i", 9000), struct.pack("!i", (1 << 31) - 1)),
    1114: (struct.pack("!q", 1 << 50), struct.pack("!q", -(1 << 63))),
    1184: (struct.pack("!q", 1 << 50),),
    25: TEXTS[25],
    2950: (bytes(range(16)),),
    3802: (b'\1{"k": 1}',),
    NUMERIC_OID: (struct.pack("!hhHhhh", 2, 0, 0, 2, 12, 3400), struct.pack("!hhHh", 0, 0, 0xC000, 0)),
}


class Fuzz:
    """One seed. `told` counts how often each decoder took what it was given, and how often it refused."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.told: dict[str, list[int]] = {}

    # -- valid bytes ------------------------------------------------------------------------------------------------

    def _value(self, plan: ColumnPlan, values: dict[int, tuple[bytes, ...]]) -> bytes | None:
        if self.rng.random() < 0.15:
            return None
        return self.rng.choice(values[plan.type_oid][: 1 if plan.precision else None])  # NaN is no decimal

    def _row(self, plans: Sequence[ColumnPlan], chosen: Sequence[int]) -> bytes:
        parts = [struct.pack("!h", len(plans))]
        for plan, form in zip(plans, chosen, strict=True):
            value = self._value(plan, BINARY if form else TEXTS)
            parts.append(struct.pack("!i", -1 if value is None else len(value)) + (value or b""))
        return b"".join(parts)

    def _tuple(self, plans: Sequence[ColumnPlan]) -> bytes:
        parts = [struct.pack("!H", len(plans))]
        for plan in plans:
            value = self._value(plan, TEXTS)
            parts.append(b"n" if value is None else b"t" + struct.pack("!I", len(value)) + value)
        return b"".join(parts)

    def _relation(self) -> bytes:
        columns = b"".join(b"\0%s\0" % c.name.encode() + struct.pack("!Ii", c.type_oid, c.typmod) for c in COLUMNS)
        return b"R" + struct.pack("!I", OID) + b"public\0t\0f" + struct.pack("!H", len(COLUMNS)) + columns

    def _transaction(self) -> list[bytes]:
        rng = self.rng
        head = struct.pack("!I", OID)
        changes = [
            b"I" + head + b"N" + self._tuple(PLANS),
            b"U" + head + b"O" + self._tuple(PLANS) + b"N" + self._tuple(PLANS),
            b"D" + head + b"O" + self._tuple(PLANS),
            b"T" + struct.pack("!IBI", 1, 0, OID),
        ]
        some = [rng.choice(changes) for _ in range(rng.randint(1, 4))]
        begin = b"B" + struct.pack("!QqI", 100, 0, 7)
        return [begin, self._relation(), *some, b"C" + struct.pack("!BQQq", 0, 100, 108, 0)]

    # -- damage -----------------------------------------------------------------------------------------------------

    def damaged(self, message: bytes) -> bytes:
        data, rng = bytearray(message), self.rng
        for _ in range(rng.choice((0, 0, 1, 1, 1, 3))):
            if not data:
                break
            at = rng.randrange(len(data) if rng.random() < 0.5 else min(8, len(data)))  # heads matter most
            match rng.randrange(5):
                case 0:
                    data[at] ^= 1 << rng.randrange(8)
                case 1:
                    data[at : at + 4] = struct.pack("!i", rng.choice(LENGTHS))
                case 2:
                    data[at : at + 2] = struct.pack("!h", rng.choice((-1, 0, 1, 2, 32767)))
                case 3:
                    del data[at:]
                case _:
                    data[at:at] = rng.randbytes(rng.randint(1, 5))
        return bytes(data)

    def _lied(self, frame: bytes) -> bytes:
        """A frame as it is, damaged, or with another length."""
        match self.rng.randrange(5):
            case 0:
                return self.damaged(frame)
            case 1:
                return frame[:1] + struct.pack("!i", self.rng.choice(LENGTHS)) + frame[5:]
            case _:
                return frame

    # -- decoders ---------------------------------------------------------------------------------------------------

    def select_rows(self) -> None:
        chosen = forms(FLAT)
        self._decode_rows([self._row(FLAT, chosen) for _ in range(3)], chosen)

    def copy_rows(self) -> None:
        header = b"PGCOPY\n\xff\r\n\0" + bytes(8)
        first, *rest = (self._row(FLAT, [1] * len(FLAT)) for _ in range(3))
        self._decode_rows([header + first, *rest, b"\xff\xff"], None)

    def _decode_rows(self, rows: list[bytes], chosen: tuple[int, ...] | None) -> None:
        parts = [self.damaged(r) if self.rng.random() < 0.5 else r for r in rows]
        ends = np.cumsum([len(p) for p in parts])
        data = np.frombuffer(b"".join(parts), np.uint8)
        starts = ends - np.array([len(p) for p in parts])
        RowDecoder(FLAT, chosen).decode(WireRows.of(Messages(data, starts, ends, True), chosen))

    def copied_lines(self) -> None:
        lines = []
        for _ in range(3):
            texts = (self._value(p, TEXTS) for p in PLANS)
            lines.append(b"\t".join(b"\\N" if t is None else t.replace(b"\\", b"\\\\") for t in texts) + b"\n")
        decode_copy(self.damaged(b"".join(lines)), PLANS, row_id=self.rng.random() < 0.5)

    def texts(self) -> None:
        """Values by themselves, among others before and behind them."""
        plan = self.rng.choice(PLANS)
        parts = [self.damaged(self.rng.choice(TEXTS[plan.type_oid])) for _ in range(4)]
        ends = np.cumsum([len(p) for p in parts])
        sizes = np.array([len(p) for p in parts])
        decode_column(plan, np.frombuffer(b"".join(parts), np.uint8), ends - sizes, sizes)

    def spooled(self) -> None:
        messages = self._transaction()
        if self.rng.random() < 0.8:
            messages = [self.damaged(m) if self.rng.random() < 0.3 else m for m in messages]
            data = b"".join(spool_frame(i, m) for i, m in enumerate(messages, 1))
        else:
            data = self.damaged(b"".join(spool_frame(i, m) for i, m in enumerate(messages, 1)))
        frames = scan_frames(data)
        relation = parse_relation(self._relation())
        decode_events(None, relation, PLANS, frames=frames, row_id=self.rng.random() < 0.5)
        for batch in decode_range(frames, OID, PLANS, initial=self._relation()):
            batch.changes()

    def relation(self) -> None:
        parse_relation(self.damaged(self._relation()))

    def transactions(self) -> None:
        scanner = StreamScanner()
        for message in self._transaction():
            scanner.feed(self.damaged(message))

    def frames(self) -> None:
        """Frames one after the other, out of bytes that are heads of frames more often than not."""
        data = np.frombuffer(bytes(self.rng.choices(b"d\0\0\0\0\1\2\3\4\5\7\x0b\xff", k=60)), np.uint8)
        out = np.empty(data.size, np.uint8)
        used = self.rng.randint(0, data.size)
        begin = data.tobytes().find(b"d")
        at, filled = _strip_frames(data, max(begin, 0), used, ord("d"), out, 0)
        assert 0 <= filled <= out.size and 0 <= at <= data.size, "rows would be written before the buffer"
        starts, ends = np.empty((2, 9), np.int64)
        at, count = find_messages(data, max(begin, 0), used, ord("d"), starts, ends, 0)
        assert all(0 <= s <= e <= used for s, e in zip(starts[:count], ends[:count], strict=True))

    def answer(self) -> None:
        """A whole answer past libpq, in pieces: rows of a SELECT as messages, lines of a COPY as blocks."""
        kind, body = (b"D", self._row(FLAT, forms(FLAT))) if self.rng.random() < 0.5 else (b"d", b"1\ttext\n")
        frames = [b"T" + struct.pack("!IH", 6, 0), *[_framed(kind, body)] * 3, _framed(b"C", b"COPY 3\0")]
        frames.append(_framed(b"Z", b"I"))
        data = b"".join(self._lied(f) for f in frames)
        wire = FakeWire(data, self.rng)
        rows = _RawRows(FakeConnection(), 64, kind[0], wire)  # type: ignore[arg-type]
        rows.send(b"")
        try:
            while not rows._done:
                if kind == b"D":
                    piece = rows.next_messages(200, lambda _: None)
                    assert all(0 <= s <= e <= piece.data.size for s, e in zip(piece.starts, piece.ends, strict=True))
                elif rows.next_block() is None:
                    break
        finally:
            rows.close()
        assert wire.asked < 10_000, "it goes on for ever"

    def stream(self) -> None:
        messages = [b"w" + struct.pack("!QQq", i, i, 0) + m for i, m in enumerate(self._transaction(), 200)]
        messages.append(b"k" + struct.pack("!QqB", 300, 0, 0))
        self._drain([self.damaged(m) if self.rng.random() < 0.3 else m for m in messages], backlogged=False)

    def backlog(self) -> None:
        rows = [struct.pack("!hiQi", 2, 8, 200, len(m)) + m for m in self._transaction()]
        header = b"PGCOPY\n\xff\r\n\0" + bytes(8)
        rows = [self.damaged(r) if self.rng.random() < 0.3 else r for r in [header + rows[0], *rows[1:], b"\xff\xff"]]
        self._drain(rows, backlogged=True)

    def _drain(self, messages: list[bytes], *, backlogged: bool) -> None:
        conn: Any = FakeStream([m for m in messages if m])
        assembler = Assembler(FakeSpool(), History(0, 0, {}))  # type: ignore[arg-type]
        with contextlib.suppress(DoneStreaming):
            backlog.drain(conn, assembler) if backlogged else assembler.drain(conn)

    def decoders(self) -> list[Callable[[], None]]:
        return [
            self.select_rows,
            self.copy_rows,
            self.copied_lines,
            self.texts,
            self.spooled,
            self.relation,
            self.transactions,
            self.frames,
            self.answer,
            self.stream,
            self.backlog,
        ]

    def run(self, seconds: float) -> None:
        deadline = float("inf")
        rounds = 0
        while time.monotonic() < deadline:
            rounds += 1
            if rounds == WARM:  # by then all is compiled
                deadline = time.monotonic() + seconds
            for decoder in self.decoders():
                told = self.told.setdefault(decoder.__name__, [0, 0])
                try:
                    decoder()
                    told[0] += 1
                except (HeadwaterError, psycopg.Error):
                    told[1] += 1


def _framed(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


class FakeWire:
    """Gives the bytes in pieces of any size, then the end of the connection."""

    def __init__(self, data: bytes, rng: random.Random) -> None:
        self.data, self.rng, self.asked = data, rng, 0

    def send(self, data: bytes) -> None:
        pass

    def receive(self, room: memoryview, wait_ms: int, patience_s: float) -> int:
        self.asked += 1
        size = min(self.rng.randint(1, 60), len(self.data), len(room))
        room[:size] = self.data[:size]
        self.data = self.data[size:]
        return size

    def wake_for(self, size: int) -> None:
        pass

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeConnection:
    pgconn: Any

    def __init__(self) -> None:
        self.pgconn = self

    def exec_(self, _: bytes) -> None:
        pass

    def cancel_safe(self) -> None:
        pass


class FakeStream:
    def __init__(self, messages: list[bytes]) -> None:
        self.messages = messages

    def get_copy_data(self, _: int) -> tuple[int, memoryview]:
        if not self.messages:
            return -1, memoryview(b"")
        message = self.messages.pop(0)
        return len(message), memoryview(message)


class FakeSpool:
    durable_lsn = 0
    written_lsn = 0

    def begin(self, xid: int) -> None:
        pass

    def append(self, lsn: int, message: memoryview) -> None:
        assert len(message) >= 7

    def commit(self, end_lsn: int, commit_us: int) -> None:
        pass

    def describe(self, kind: int, oid: int, lsn: int, message: bytes) -> None:
        pass

    def advance(self, lsn: int) -> None:
        pass


def main(seed: int, seconds: float) -> None:
    assert config.BOUNDSCHECK, "an access beyond an array would not be noticed"
    fuzz = Fuzz(seed)
    try:
        fuzz.run(seconds)
    except BaseException:
        print(f"seed {seed}", file=sys.stderr)
        raise
    for name, (taken, refused) in fuzz.told.items():
        print(f"{name}: {taken} taken, {refused} refused")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
