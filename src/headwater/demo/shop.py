"""The demo's shop: its schema, its first rows, and customers who never stop. `Load` writes from a thread of its own."""

from __future__ import annotations

import random
import threading
from typing import Any, Final

import psycopg

from headwater.testing.servers import PostgresServer

DATABASE: Final = "shop"
WAREHOUSE: Final = "warehouse"
CUSTOMERS_PER_ORDER: Final = 10  # one customer has about ten orders
COUNTRIES: Final = ("AT", "BR", "CA", "DE", "ES", "FR", "GB", "IN", "JP", "US")
# Steady, and small against what the engine can take: the demo shows correctness under change, not a limit.
PAUSE_S: Final = 0.01

_SCHEMA: Final = (
    "CREATE TABLE customers (id bigint PRIMARY KEY, name text NOT NULL, country text NOT NULL)",
    "CREATE TABLE orders (id bigint PRIMARY KEY, customer_id bigint NOT NULL, amount numeric(10,2) NOT NULL, "
    "status text NOT NULL, placed_at timestamptz NOT NULL DEFAULT now(), note text)",
)


def make_shop(server: PostgresServer, rows: int) -> None:
    """Two databases: the shop with its tables, and an empty warehouse."""
    server.create_database(DATABASE)
    server.create_database(WAREHOUSE)
    customers = max(1, rows // CUSTOMERS_PER_ORDER)
    with server.connect(DATABASE) as connection:
        for statement in _SCHEMA:
            connection.execute(statement.encode())
        connection.execute(
            "INSERT INTO customers SELECT i, 'customer ' || i, (%s::text[])[1 + i %% 10] FROM generate_series(1, %s) i",
            (list(COUNTRIES), customers),
        )
        connection.execute(
            "INSERT INTO orders SELECT i, 1 + i %% %s, (i %% 100000) / 100.0, 'new', now() - i * interval '1 second', "
            "repeat('x', (i %% 50)::int) FROM generate_series(1, %s) i",
            (customers, rows),
        )
        connection.execute("ANALYZE")


class Load:
    """Random transactions on the shop: new orders, changes, cancellations, moves, renumbered orders."""

    def __init__(self, server: PostgresServer, rows: int, seed: int = 1) -> None:
        self._server = server
        self._random = random.Random(seed)
        self._orders = rows
        self._customers = max(1, rows // CUSTOMERS_PER_ORDER)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.transactions = 0
        self.error: BaseException | None = None

    def start(self) -> None:
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            with self._server.connect(DATABASE) as connection:
                while not self._stopping.wait(PAUSE_S):
                    with connection.transaction():
                        self._transaction(connection)
                    self.transactions += 1
        except psycopg.Error as error:
            self.error = error

    def _transaction(self, connection: psycopg.Connection[Any]) -> None:
        for _ in range(self._random.randint(1, 3)):
            dice = self._random.random()
            if dice < 0.50:
                self._new_order(connection)
            elif dice < 0.80:
                connection.execute(
                    "UPDATE orders SET amount = amount + 0.01, status = 'paid' WHERE id = %s", (self._an_order(),)
                )
            elif dice < 0.92:
                connection.execute("DELETE FROM orders WHERE id = %s", (self._an_order(),))
            elif dice < 0.95:
                self._orders += 1
                connection.execute("UPDATE orders SET id = %s WHERE id = %s", (self._orders, self._an_order()))
            else:
                self._move(connection)

    def _an_order(self) -> int:
        return self._random.randint(1, self._orders)

    def _new_order(self, connection: psycopg.Connection[Any]) -> None:
        self._orders += 1
        connection.execute(
            "INSERT INTO orders (id, customer_id, amount, status) VALUES (%s, %s, %s, 'new')",
            (self._orders, self._random.randint(1, self._customers), self._random.randint(100, 99_999) / 100),
        )

    def _move(self, connection: psycopg.Connection[Any]) -> None:
        if self._random.random() < 0.5:
            self._customers += 1
            connection.execute(
                "INSERT INTO customers VALUES (%s, %s, %s)",
                (self._customers, f"customer {self._customers}", self._random.choice(COUNTRIES)),
            )
            return
        connection.execute(
            "UPDATE customers SET country = %s WHERE id = %s",
            (self._random.choice(COUNTRIES), self._random.randint(1, self._customers)),
        )
