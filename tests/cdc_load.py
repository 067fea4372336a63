"""The load of the exactness test: random transactions over four tables, by several writers at once, seeded.

acc   bigint key, large values (TOAST)      comp   composite key, text in byte order
nat   text key in a collation whose order we cannot reproduce
ledger   uuid key, only ever written in one transaction with acc: each entry there has its sum of changes here

The writers live through restarts of the server and lost connections: what became of a transaction whose answer was
lost, the witness knows. `Chaos` makes that trouble.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg

TABLES = ["acc", "comp", "nat", "ledger", "series"]
SERIES = 10  # times as many rows as the others: all numbers from one on, so that it is read page by page
# What a server that goes down, or comes up, makes of a statement.
LOST = (psycopg.OperationalError, psycopg.InterfaceError)
SCHEMA = """
CREATE TABLE acc (id bigint PRIMARY KEY, grp int, val bigint, big text);
ALTER TABLE acc ALTER big SET STORAGE EXTERNAL;
CREATE TABLE comp (a text COLLATE "C", b int, val bigint, PRIMARY KEY (a, b));
CREATE TABLE nat (name text COLLATE "{collation}" PRIMARY KEY, val bigint, big text);
ALTER TABLE nat ALTER big SET STORAGE EXTERNAL;
CREATE TABLE ledger (id uuid PRIMARY KEY, amount numeric(12, 2), note jsonb);
CREATE TABLE series (id bigint PRIMARY KEY, val bigint, note text);
"""
FILL = """
INSERT INTO acc SELECT i * 3, i % 7, 1000, CASE WHEN i % 10 = 0 THEN repeat(md5(i::text), 300) END
  FROM generate_series(1, {n}) i;
INSERT INTO comp SELECT 'k' || (i % 50), i, 1000 FROM generate_series(1, {n}) i;
INSERT INTO nat SELECT (ARRAY['a','B','ä','Z'])[i % 4 + 1] || i, 0,
  CASE WHEN i % 10 = 0 THEN repeat(md5(i::text), 300) END FROM generate_series(1, {n}) i;
INSERT INTO ledger SELECT md5(i::text)::uuid, 0, NULL FROM generate_series(1, {n}) i;
INSERT INTO series SELECT i, 1000, 'as it was' FROM generate_series(1, {n} * 10) i;
ANALYZE;
"""


class Writers:
    """Threads that write until they are stopped; an error in one of them is the test's."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], seed: int, rows: int) -> None:
        self.connect, self.rows = connect, rows
        self.stopping = threading.Event()
        self.errors: list[BaseException] = []
        self.committed = 0
        self.lost = 0
        jobs = [(self._write, seed * 10 + 1), (self._write, seed * 10 + 2), (self._hold_open, seed * 10 + 3)]
        self.threads = [threading.Thread(target=self._guarded, args=job, daemon=True) for job in jobs]

    def __enter__(self) -> Writers:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(60)
        if self.errors:
            raise self.errors[0]

    def _guarded(self, work: Callable[[psycopg.Connection[Any], random.Random], None], seed: int) -> None:
        rng = random.Random(seed)
        while not self.stopping.is_set():
            try:
                with self.connect() as connection:
                    work(connection, rng)
            except LOST:
                self.lost += 1
                self.stopping.wait(0.2)
            except BaseException as error:
                self.errors.append(error)
                return

    def _write(self, connection: psycopg.Connection[Any], rng: random.Random) -> None:
        while not self.stopping.is_set():
            # Two writers may wait for each other, or meet at one key: then this transaction is one that never was.
            with contextlib.suppress(psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
                connection.execute("BEGIN")
                for _ in range(rng.choice([1, 1, 2, 5])):
                    rng.choices(STEPS, WEIGHTS)[0](connection, rng, self.rows)
                connection.execute("ROLLBACK" if rng.random() < 0.1 else "COMMIT")
                self.committed += 1
                time.sleep(rng.random() * 0.02)
                continue
            connection.execute("ROLLBACK")

    def _hold_open(self, connection: psycopg.Connection[Any], rng: random.Random) -> None:
        """Transactions that stay open while many others begin and end."""
        while not self.stopping.is_set():
            number = rng.getrandbits(40)
            connection.execute("BEGIN")
            connection.execute("INSERT INTO acc VALUES (%s, 9, 0, NULL)", (-number,))
            connection.execute("SAVEPOINT one")
            connection.execute("INSERT INTO nat VALUES (%s, 0, NULL)", (f"open {number}",))
            self.stopping.wait(rng.uniform(1, 5))
            connection.execute("UPDATE acc SET val = val + 1 WHERE id = %s", (-number,))
            connection.execute("ROLLBACK" if rng.random() < 0.3 else "COMMIT")
            self.stopping.wait(0.5)


GROWTH = 1.15  # of the pause between two faults


class Chaos:
    """Cuts connections, and restarts the server, at random moments until the end of the block; seeded.

    The pauses grow: a copy whose reads share one snapshot starts over with every cut, and must come to an end.
    """

    def __init__(self, server: Any, proxy: Any, seed: int, pause_s: tuple[float, float], restarts: bool = True) -> None:
        self.server, self.proxy, self.pause_s, self.restarts = server, proxy, pause_s, restarts
        self.rng = random.Random(seed)
        self.stopping = threading.Event()
        self.done: list[str] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Chaos:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(120)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        kinds = ["cut", "cut", "cut after", "fast", "immediate"] if self.restarts else ["cut", "cut after"]
        try:
            while not self.stopping.wait(self.rng.uniform(*self.pause_s) * GROWTH ** len(self.done)):
                self._strike(self.rng.choice(kinds))
        except BaseException as error:
            self.error = error

    def _strike(self, kind: str) -> None:
        self.done.append(kind)
        if kind == "cut":
            self.proxy.cut()
        elif kind == "cut after":
            # Each connection of the next seconds ends after some bytes: in the middle of a message, or of a copy.
            self.proxy.cut_after(self.rng.randint(2_000, 300_000))
            self.stopping.wait(2)
            self.proxy.cut_after(None)
        else:
            self.server.restart(kind)


def _transfer(c: Any, rng: random.Random, n: int) -> None:
    """One transaction over two tables: half of it must never be seen."""
    amount = rng.randint(1, 9)
    c.execute("UPDATE acc SET val = val - %s WHERE id = %s", (amount, 3 * rng.randint(1, n)))
    c.execute("UPDATE comp SET val = val + %s WHERE b = %s", (amount, rng.randint(1, n)))


def _insert(c: Any, rng: random.Random, n: int) -> None:
    number = rng.randint(1, 4 * n)
    big = f"{number:05d}" * 2500 if rng.random() < 0.3 else None
    c.execute("INSERT INTO acc VALUES (%s, 1, 5, %s) ON CONFLICT DO NOTHING", (3 * number + 1, big))
    c.execute("INSERT INTO nat VALUES (%s, 5, %s) ON CONFLICT DO NOTHING", (f"Ünew{number}", big))


def _delete(c: Any, rng: random.Random, n: int) -> None:
    c.execute("DELETE FROM acc WHERE id = %s", (3 * rng.randint(1, n),))
    c.execute("DELETE FROM nat WHERE name = %s", (f"B{rng.randint(1, n)}",))


def _touch(c: Any, rng: random.Random, n: int) -> None:
    """Rows with a large value that does not change."""
    c.execute("UPDATE acc SET grp = grp + 1 WHERE id = %s", (30 * rng.randint(1, n // 10),))
    c.execute("UPDATE nat SET val = val + 1 WHERE name LIKE %s", (f"%{10 * rng.randint(1, n // 10)}",))


def _move_unchanged(c: Any, rng: random.Random, n: int) -> None:
    """Changes of key of rows with a large value that stays as it is: the stream leaves it out."""
    target = 3 * rng.randint(-n, 5 * n) + 2
    c.execute(
        "UPDATE acc SET id = %s WHERE id = %s AND NOT EXISTS (SELECT FROM acc WHERE id = %s)",
        (target, 30 * rng.randint(1, n // 10), target),
    )
    c.execute("UPDATE acc SET id = -id WHERE id IN (SELECT id FROM acc WHERE big IS NOT NULL AND id > 0 LIMIT 1)")
    c.execute("UPDATE nat SET name = 'moved ' || name WHERE name = %s", (f"ä{10 * rng.randint(1, n // 10)}",))


def _book(c: Any, rng: random.Random, n: int) -> None:
    """Three tables in one transaction, with a value of each kind."""
    number = rng.getrandbits(30)
    entry = rng.randint(1, 4 * n)
    note = json.dumps({"n": number, "t": "é" * rng.choice([0, 3, 4000])}, ensure_ascii=False)
    c.execute(
        "INSERT INTO ledger VALUES (md5(%s)::uuid, %s, %s) "
        "ON CONFLICT (id) DO UPDATE SET amount = ledger.amount + excluded.amount",
        (str(entry), f"{number / 100:.2f}"[-9:], note),
    )
    c.execute("UPDATE acc SET val = val + 1 WHERE id = %s", (3 * (entry % n + 1),))
    c.execute("UPDATE comp SET val = val - 1 WHERE b = %s", (entry % n + 1,))


def _move(c: Any, rng: random.Random, n: int) -> None:
    """Changes of key, mostly into another split."""
    big = "y" * 9000 if rng.random() < 0.5 else None
    c.execute(
        "UPDATE acc SET id = %s, big = %s WHERE id = %s AND NOT EXISTS (SELECT FROM acc WHERE id = %s)",
        (target := 3 * rng.randint(1, 4 * n) + 2, big, 3 * rng.randint(1, n), target),
    )
    c.execute(
        "UPDATE comp SET a = %s WHERE b = %s AND a <> %s",
        (letter := rng.choice("aAzké") + str(rng.randint(0, 9)), rng.randint(1, n), letter),
    )
    c.execute("UPDATE nat SET name = name || '!' WHERE name = %s", (f"Z{rng.randint(1, n)}",))


def _savepoint(c: Any, rng: random.Random, n: int) -> None:
    _insert(c, rng, n)
    c.execute("SAVEPOINT one")
    _delete(c, rng, n)
    _transfer(c, rng, n)
    c.execute("ROLLBACK TO one" if rng.random() < 0.5 else "RELEASE one")
    _touch(c, rng, n)


def _bulk(c: Any, rng: random.Random, n: int) -> None:
    """Thousands of rows at once: more than what one read of the stream brings."""
    low = rng.randint(1, 3 * n)
    c.execute("UPDATE acc SET val = val + 1 WHERE id BETWEEN %s AND %s", (low, low + n))
    c.execute("UPDATE comp SET val = val - 1 WHERE b BETWEEN %s AND %s", (low, low + n))
    c.execute(
        "INSERT INTO comp SELECT 'bulk' || %s, i, 0 FROM generate_series(1, %s) i ON CONFLICT DO NOTHING",
        (rng.randint(1, 3), BULK_ROWS),
    )
    if rng.random() < 0.7:
        c.execute("DELETE FROM comp WHERE a LIKE 'bulk%%'")


def _truncate(c: Any, rng: random.Random, n: int) -> None:
    table = rng.choice(["comp", "nat", "comp, nat", "ledger"])
    _transfer(c, rng, n)
    c.execute(f"TRUNCATE {table}")
    if "comp" in table:
        c.execute("INSERT INTO comp SELECT 't' || (i %% 9), i, 1 FROM generate_series(1, %s) i", (n // 2,))
    if "nat" in table:
        c.execute("INSERT INTO nat SELECT 'after' || i, 1, repeat('q', 9000) FROM generate_series(1, 30) i")
    if rng.random() < 0.3:
        c.execute("SAVEPOINT two")
        c.execute("TRUNCATE acc")
        c.execute("ROLLBACK TO two")


def _series(c: Any, rng: random.Random, n: int) -> None:
    """Rows get another place, go, come back, come behind the last one, or get another key."""
    one, two, three, four = (rng.randint(1, SERIES * n) for _ in range(4))
    c.execute("UPDATE series SET val = val + 1, note = repeat('y', %s) WHERE id = %s", (rng.randint(1, 900), one))
    c.execute("DELETE FROM series WHERE id = %s", (two,))
    again = rng.choice([two, three, SERIES * n + three])
    c.execute("INSERT INTO series VALUES (%s, 1, 'new') ON CONFLICT (id) DO UPDATE SET val = 0", (again,))
    c.execute("UPDATE series SET id = -id WHERE id = %s", (four,))


BULK_ROWS = 20_000
STEPS: list[Callable[[Any, random.Random, int], None]] = [
    _transfer,
    _insert,
    _delete,
    _touch,
    _move,
    _move_unchanged,
    _book,
    _savepoint,
    _bulk,
    _truncate,
    _series,
]
# About one step in a thousand is a TRUNCATE, or a bulk change: tables that are always empty prove nothing.
WEIGHTS = [20, 20, 15, 15, 10, 6, 15, 8, 0.06, 0.05, 12]
