"""The demo's verdict: tables, view and sink compared with what the source itself says. Nothing here trusts the engine.

A table: number of rows and a checksum over every value of every row, computed by each side in its own SQL. The view:
the same query run on the source. The sink: the target's rows against the view's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from headwater.demo.process import EngineProcess
from headwater.demo.shop import DATABASE, WAREHOUSE
from headwater.testing.servers import PostgresServer

VIEW_QUERY: Final = (
    "SELECT c.country, count(*) AS order_count, sum(o.amount) AS revenue "
    "FROM orders o JOIN customers c ON o.customer_id = c.id GROUP BY c.country"
)
# Eight hex digits of each row's MD5, added up: order does not matter, one changed value of one row does.
_SOURCE_SUM: Final = "coalesce(sum(('x' || substr(md5({row}), 1, 8))::bit(32)::bigint), 0)::text"
_OUR_SUM: Final = "cast(coalesce(sum(cast(conv(substr(md5({row}), 1, 8), 16, 10) as bigint)), 0) as string)"
_SEPARATED: Final = "concat_ws('|', {columns})"
_TABLES: Final[dict[str, tuple[str, str]]] = {
    "customers": ("id, name, country", "id, name, country"),
    "orders": (
        "id, customer_id, amount, status, (extract(epoch from placed_at) * 1000000)::bigint, coalesce(note, '-')",
        "id, customer_id, amount, status, unix_micros(placed_at), coalesce(note, '-')",
    ),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One thing that was compared: what each side says, as text."""

    what: str
    ours: str
    theirs: str

    @property
    def equal(self) -> bool:
        return self.ours == self.theirs


def compare_all(engine: EngineProcess, server: PostgresServer) -> list[Comparison]:
    found = [_table(name, engine, server) for name in _TABLES]
    view = _view_text(engine.run("SELECT country, order_count, revenue FROM revenue"))
    found.append(Comparison("view revenue", view, _view_text(_rows(server, DATABASE, VIEW_QUERY))))
    target = _rows(server, WAREHOUSE, "SELECT country, order_count, revenue FROM revenue")
    found.append(Comparison("sink revenue_out", _view_text(target), view))
    return found


def _table(name: str, engine: EngineProcess, server: PostgresServer) -> Comparison:
    source_columns, our_columns = _TABLES[name]
    source_sum = _SOURCE_SUM.format(row=_SEPARATED.format(columns=source_columns))
    our_sum = _OUR_SUM.format(row=_SEPARATED.format(columns=our_columns))
    theirs = _rows(server, DATABASE, f"SELECT count(*) AS n, {source_sum} AS checksum FROM {name}")[0]
    ours = engine.run(f"SELECT count(*) AS n, {our_sum} AS checksum FROM {name}")[0]
    return Comparison(f"table {name}", _table_text(ours), _table_text(theirs))


def _table_text(row: dict[str, Any]) -> str:
    return f"{int(row['n']):,} rows, checksum {row['checksum']}"


def _view_text(rows: Sequence[dict[str, Any]]) -> str:
    lines = sorted(f"{r['country']} {int(r['order_count'])} {r['revenue']}" for r in rows)
    orders = sum(int(r["order_count"]) for r in rows)
    return f"{len(lines)} rows over {orders:,} orders: " + "; ".join(lines)


def _rows(server: PostgresServer, database: str, query: str) -> list[dict[str, Any]]:
    from psycopg.rows import dict_row

    with server.connect(database) as connection, connection.cursor(row_factory=dict_row) as cursor:
        return list(cursor.execute(query.encode()).fetchall())
