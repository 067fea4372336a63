"""Catalogue, splits, snapshots, publication, slot and checks against real servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pytest

from headwater.capture.splits import Page, Split, SplitKind, splits_between
from headwater.connectors.postgres import planner, slots
from headwater.connectors.postgres.catalogue import TableInfo, describe, list_tables
from headwater.connectors.postgres.check import check_source
from headwater.connectors.postgres.client import PostgresConfig, connect, parse_lsn
from headwater.connectors.postgres.planner import (
    copy_statement,
    current_types,
    marked_read,
    page_end,
    plan_splits,
    prefer_index,
    prefer_pages,
    split_query,
    visible,
)
from headwater.errors import HeadwaterError, UsageError
from headwater.runtime.source_setup import new_slot
from headwater.testing.servers import PostgresServer
from postgres_versions import SERVERS

pytestmark = pytest.mark.postgres


@dataclass
class Db:
    server: PostgresServer
    name: str
    conn: psycopg.Connection[Any]

    def config(self, **options: str) -> PostgresConfig:
        base = {
            "hostname": self.server.host,
            "port": str(self.server.port),
            "username": self.server.user,
            "password": self.server.password,
            "database.name": self.name,
            "slot.name": f"slot_{self.name}",
            "publication.name": "Pub of Headwater",
        }
        return PostgresConfig.from_options({**base, **{k.replace("_", "."): v for k, v in options.items()}})

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.conn.execute(statement.encode())

    def table(self, name: str, schema: str = "public") -> TableInfo:
        return describe(self.conn, schema, name)

    def counts(self, table: TableInfo, splits: list[Split]) -> list[int]:
        """Rows of each split; together they must be the whole table."""
        counts = []
        for split in splits:
            query = split_query(table, [table.columns[0].name], split)
            row = self.conn.execute(b"SELECT count(*) FROM (" + query.as_bytes(self.conn) + b") t").fetchone()
            counts.append(row[0] if row else 0)
        whole = self.conn.execute(
            b"SELECT count(*) FROM " + table.from_clause.as_bytes(self.conn)  # each row is in exactly one split
        ).fetchone()
        assert whole is not None and sum(counts) == whole[0]
        return counts


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> PostgresServer:
    found: PostgresServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def db(server: PostgresServer) -> Iterator[Db]:
    name = f"planner_{time.time_ns()}"
    server.create_database(name)
    db = Db(server, name, connect(Db(server, name, None).config()))  # type: ignore[arg-type]
    yield db
    db.run("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()")
    db.conn.close()


def _even(counts: list[int], target: int, *, within: float) -> None:
    inner = counts[:-1] if len(counts) > 2 else counts
    assert max(counts) <= target * (1 + within), counts
    assert min(inner) >= target * (1 - within), counts


EVEN_TABLES = {
    "serial": ("id bigint PRIMARY KEY", "SELECT g FROM generate_series(1, 50000) g"),
    "negative": ("id int PRIMARY KEY", "SELECT g FROM generate_series(-25000, 24999) g"),
    "skewed": ("id bigint PRIMARY KEY", "SELECT (g::float8 ^ 3.5)::bigint FROM generate_series(1, 50000) g"),
    "uuid": ("id uuid PRIMARY KEY", "SELECT md5(g::text)::uuid FROM generate_series(1, 50000) g"),
    "text": (
        'id text COLLATE "C" PRIMARY KEY',
        "SELECT repeat('customer-', 3) || md5(g::text) FROM generate_series(1, 50000) g",
    ),
    "quoted": (
        'id text COLLATE "C" PRIMARY KEY',
        "SELECT E'a''b\\\\c\"' || chr(200 + g % 50) || g FROM generate_series(1, 50000) g",
    ),
    "composite": (
        "a int, b text, c int, PRIMARY KEY (a, b, c)",
        "SELECT 1, 'x' || (g % 3), g FROM generate_series(1, 50000) g",
    ),
    "constant_first": (
        "tenant int, id bigint, PRIMARY KEY (tenant, id)",
        "SELECT CASE WHEN g <= 100 THEN g ELSE 7777 END, g FROM generate_series(1, 50000) g",
    ),
    "bytes": ("id bytea PRIMARY KEY", "SELECT decode(md5(g::text), 'hex') FROM generate_series(1, 50000) g"),
    "decimal": ("id numeric PRIMARY KEY", "SELECT g / 7.0 FROM generate_series(1, 50000) g"),
    "moment": (
        "id timestamptz PRIMARY KEY",
        "SELECT '2020-01-01'::timestamptz + g * interval '17 s' FROM generate_series(1, 50000) g",
    ),
}


@pytest.mark.parametrize("name", EVEN_TABLES)
def test_splits_are_even_and_cover_every_row_once(db: Db, name: str) -> None:
    columns, select = EVEN_TABLES[name]
    db.run(f"CREATE TABLE t ({columns})", f"INSERT INTO t {select}")
    table = db.table("t")
    assert table.ordered_key
    splits = plan_splits(db.conn, table, rows_per_split=4000)
    counts = db.counts(table, splits)
    assert len(counts) == 13
    _even(counts, 4000, within=0.05)


@pytest.mark.parametrize("analysed", [True, False])
def test_large_table_is_planned_from_a_sample(db: Db, analysed: bool) -> None:
    db.run(
        "CREATE TABLE t (a int, b uuid, filler text, PRIMARY KEY (a, b))",
        "INSERT INTO t SELECT g % 10, md5(g::text)::uuid, repeat('x', 500) FROM generate_series(1, 60000) g",
    )
    if analysed:
        db.run("ANALYZE t")
    table = db.table("t")
    assert table.pages > 2000
    counts = db.counts(table, plan_splits(db.conn, table, rows_per_split=5000))
    assert 10 <= len(counts) <= 14
    _even(counts, 5000, within=0.25)


def test_sample_of_a_table_in_key_order_is_even_too(db: Db) -> None:
    db.run(
        "CREATE TABLE t (id bigint PRIMARY KEY, filler text)",
        "INSERT INTO t SELECT g::bigint * g, repeat('x', 1000) FROM generate_series(1, 60000) g",
        "ANALYZE t",
    )
    table = db.table("t")
    counts = db.counts(table, plan_splits(db.conn, table, rows_per_split=5000))
    _even(counts, 5000, within=0.5)


@pytest.mark.parametrize("key", ['text COLLATE "C"', "char(8)"], ids=["key-ranges", "physical-ranges"])
def test_large_rows_are_planned_by_their_bytes(db: Db, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "SPLIT_BYTES", 1 << 20)
    db.run(
        f"CREATE TABLE t (id {key} PRIMARY KEY, v text)",
        "ALTER TABLE t ALTER v SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT g::text, repeat('x', 1000 + g % 2 * 50000) FROM generate_series(1, 400) g",
    )
    table = db.table("t")
    splits = plan_splits(db.conn, table)
    counts = db.counts(table, splits)
    if table.ordered_key:
        assert 10 <= len(splits) <= 12 and max(counts) < 60
    else:
        assert len(splits) >= 10 and max(counts) < 100
    assert len(plan_splits(db.conn, db.table("t"), rows_per_split=10)) >= len(splits)


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_one_row_tables_have_one_split(db: Db, rows: int) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY)", f"INSERT INTO t SELECT generate_series(1, {rows})")
    assert plan_splits(db.conn, db.table("t"), rows_per_split=1) == [Split(1, None, None)]


def test_row_inserted_beyond_the_last_split_belongs_to_it(db: Db) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 100)")
    table = db.table("t")
    splits = plan_splits(db.conn, table, rows_per_split=10)
    db.run("INSERT INTO t VALUES (100000), (-100000)")
    counts = db.counts(table, splits)
    assert (counts[0], counts[-1]) == (11, 11)


def test_number_of_splits_is_bounded(db: Db) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 30000)")
    splits = plan_splits(db.conn, db.table("t"), rows_per_split=1)
    assert len(splits) == 10_000


def test_nan_and_infinity_are_no_bounds_and_are_read_once(db: Db) -> None:
    db.run(
        "CREATE TABLE t (id numeric PRIMARY KEY)",
        "INSERT INTO t SELECT generate_series(1, 10)",
        "INSERT INTO t VALUES ('NaN'), ('Infinity'), ('-Infinity')",
    )
    table = db.table("t")
    splits = plan_splits(db.conn, table, rows_per_split=1)
    assert not {"NaN", "Infinity", "-Infinity"} & {b[0] for s in splits for b in (s.left, s.right) if b}
    db.counts(table, splits)


@pytest.mark.parametrize(
    "columns",
    ['id text COLLATE "en-x-icu" PRIMARY KEY', "id float8 PRIMARY KEY", "id char(5) PRIMARY KEY", "id text"],
)
def test_key_without_an_order_of_ours_gives_physical_ranges(db: Db, columns: str) -> None:
    if "icu" in columns and not db.conn.execute("SELECT 1 FROM pg_collation WHERE collname = 'en-x-icu'").fetchone():
        pytest.skip("this server was built without ICU")
    db.run(f"CREATE TABLE t ({columns}, v text)", "INSERT INTO t SELECT g, 'v' FROM generate_series(1, 20000) g")
    db.run("ANALYZE t")
    table = db.table("t")
    assert not table.ordered_key
    splits = plan_splits(db.conn, table, rows_per_split=2000)
    assert {s.kind for s in splits} == {SplitKind.CTID}
    counts = db.counts(table, splits)
    assert 9 <= len(counts) <= 12
    assert max(counts) < 2400


@pytest.mark.parametrize("key", [", PRIMARY KEY (region, id)", ""])
def test_partitioned_table_is_read_as_a_whole(db: Db, key: str) -> None:
    db.run(
        f"CREATE TABLE p (region int NOT NULL, id int NOT NULL{key}) PARTITION BY LIST (region)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1)",
        "CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2, 3)",
        "INSERT INTO p SELECT 1 + g % 3, g FROM generate_series(1, 30000) g",
        "ANALYZE p",
        "ANALYZE p1",
        "ANALYZE p2",
    )
    table = db.table("p")
    assert table.partitioned and table.rows == 30000
    assert len(db.counts(table, plan_splits(db.conn, table, rows_per_split=3000))) >= 7
    assert ("public", "p") in list_tables(db.conn) and ("public", "p1") not in list_tables(db.conn)


def test_rows_of_inheriting_tables_are_left_out(db: Db) -> None:
    db.run(
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child () INHERITS (parent)",
        "INSERT INTO parent VALUES (1)",
        "INSERT INTO child VALUES (2)",
    )
    assert db.counts(db.table("parent"), [Split(1, None, None)]) == [1]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("a int, b int, PRIMARY KEY (a, b)", "g / 4, g % 4"),
        ("a int, b int, PRIMARY KEY (a, b)", "1, g"),
        ("a int, b int, PRIMARY KEY (a, b)", "g % 3, g"),
        ('a text COLLATE "C", b uuid, PRIMARY KEY (a, b)', "'t' || g % 3, gen_random_uuid()"),
        ("a int, b int, c int, PRIMARY KEY (a, b, c)", "1, g / 100, g"),
        ("a uuid PRIMARY KEY", "gen_random_uuid()"),
    ],
)
def test_no_split_is_read_by_a_scan_of_the_whole_table(db: Db, key: str, values: str) -> None:
    """A server that takes two comparisons of keys for independent expects a quarter of the table, and scans it."""
    db.run(f"CREATE TABLE t ({key}, v text)", f"INSERT INTO t SELECT {values}, 'v' FROM generate_series(1, 10000) g")
    db.run("ANALYZE t")
    table = db.table("t")
    splits = plan_splits(db.conn, table, rows_per_split=1000)
    assert len(splits) > 5 and sum(db.counts(table, splits)) == 10000
    for in_pages in (False, True):
        with db.conn.transaction():
            prefer_index(db.conn)
            if in_pages:
                prefer_pages(db.conn)
            for split in splits:
                query = split_query(table, [table.key[0], "v"], split).as_string(db.conn)
                plan = "\n".join(r[0] for r in db.conn.execute(f"EXPLAIN {query}".encode()))
                assert "Index Cond" in plan and "Seq Scan" not in plan and "Filter" not in plan, plan
                assert not in_pages or "Bitmap Heap Scan" in plan, plan
    assert db.conn.execute("SHOW enable_seqscan").fetchone() == ("on",)


@pytest.mark.parametrize(
    ("values", "in_order"),
    [("g, 1", True), ("g / 4, g % 4", True), ("10000 - g, 1", False), ("g * 7919 % 10007, 1", False), ("1, g", False)],
)
def test_a_table_lies_in_the_order_of_its_keys_if_its_statistics_say_so(db: Db, values: str, in_order: bool) -> None:
    db.run("CREATE TABLE t (a int, b int, PRIMARY KEY (a, b))")
    db.run(f"INSERT INTO t SELECT {values} FROM generate_series(1, 10000) g")
    assert not db.table("t").in_key_order
    db.run("ANALYZE t")
    assert db.table("t").in_key_order is in_order


def test_a_split_inside_of_a_table_is_expected_to_be_small(db: Db) -> None:
    db.run(
        "CREATE TABLE t (a int, b int, v text, PRIMARY KEY (a, b))",
        "INSERT INTO t SELECT g / 4, g % 4, 'v' FROM generate_series(1, 50000) g",
        "ANALYZE t",
    )
    table = db.table("t")
    splits = plan_splits(db.conn, table, rows_per_split=1000)
    query = split_query(table, ["a", "v"], splits[len(splits) // 2]).as_string(db.conn)
    plan = "\n".join(r[0] for r in db.conn.execute(f"EXPLAIN {query}".encode()))
    assert "t_pkey" in plan and "Seq Scan" not in plan, plan


def test_a_page_ends_inside_of_its_split_or_is_all_of_it(db: Db) -> None:
    db.run(
        "CREATE TABLE t (a int, b int, PRIMARY KEY (a, b))",
        "INSERT INTO t SELECT g / 10, g FROM generate_series(1, 1000) g",
        "ANALYZE t",
    )
    table = db.table("t")
    split = Split(3, ("10", "100"), ("40", "400"))
    assert page_end(db.conn, table, split, Page(most=100, rows=50)) == ("15", "150")
    assert page_end(db.conn, table, split, Page(most=300, rows=150)) is None
    assert page_end(db.conn, table, split, Page(most=299, rows=299)) == ("39", "399")
    assert page_end(db.conn, table, split, Page(most=100)) is None
    assert page_end(db.conn, table, Split(1, None, None), Page(most=1000, rows=1000)) is None
    physical = db.table("t")
    whole = Split(1, None, None, SplitKind.CTID)
    per_page = physical.rows / physical.largest_pages
    two = Page(rows=round(2 * per_page) - 1)
    assert physical.largest_pages > 4 and page_end(db.conn, physical, whole, two) == ("(2,0)",)
    last = Split(2, (f"({physical.largest_pages - 4},0)",), None, SplitKind.CTID)
    assert page_end(db.conn, physical, last, Page(rows=round(2 * per_page) + 1)) is None


def test_names_that_need_quoting_work_everywhere(db: Db) -> None:
    db.run(
        'CREATE SCHEMA "My Schema"',
        'CREATE TABLE "My Schema"."a ""b"" %s {c}" ("Key 1" int, "k\'2" text, PRIMARY KEY ("k\'2", "Key 1"))',
        'INSERT INTO "My Schema"."a ""b"" %s {c}" SELECT g, g % 5 FROM generate_series(1, 1000) g',
    )
    table = db.table('a "b" %s {c}', "My Schema")
    assert table.key == ("k'2", "Key 1")
    assert db.counts(table, plan_splits(db.conn, table, rows_per_split=100)) == [100] * 10
    slots.ensure_publication(db.conn, db.config(), table)
    assert slots.publishes(db.conn, db.config().publication, table)


def test_split_is_copied_as_text_with_the_fixed_settings(db: Db) -> None:
    db.run(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, b bytea, i interval)",
        "INSERT INTO t SELECT g, '2020-01-01 12:00+02', '\\x00ff', '1 day 2 hours' FROM generate_series(1, 3) g",
    )
    table = db.table("t")
    split = splits_between([("2",), ("3",)])[1]
    with db.conn.cursor() as cursor, cursor.copy(copy_statement(table, ["id", "at", "b", "i"], split)) as copy:
        assert b"".join(copy) == b"2\t2020-01-01 10:00:00+00\t\\\\x00ff\t1 day 02:00:00\n"


@pytest.mark.parametrize("ours", [True, False])
def test_slot_that_nobody_can_read_on_from_is_made_anew_whoever_made_it(db: Db, ours: bool) -> None:
    config = db.config()
    db.run('CREATE PUBLICATION "Pub of Headwater" FOR ALL TABLES', "CREATE TABLE t (id int PRIMARY KEY)")
    first = slots.ensure_slot(db.conn, config).confirmed_lsn
    db.run("INSERT INTO t SELECT generate_series(1, 100)")
    try:
        assert new_slot(config, ours=False) == first, "one that can be read is taken as it stands"
        assert new_slot(config, ours=ours, unreadable=True) > first
    finally:
        slots.drop_slot(db.conn, config)


def test_types_are_those_that_a_copy_would_meet_and_not_those_of_the_snapshot(db: Db) -> None:
    db.run("CREATE DOMAIN small AS int", "CREATE TABLE t (id bigint PRIMARY KEY, n bigint, s small)")
    table = db.table("t")
    with db.server.connect(db.name) as reader:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        reader.execute("SELECT 1")
        # Eight bytes as well: read as what was planned for, they would be a number.
        db.run("ALTER TABLE t ALTER n TYPE timestamp USING to_timestamp(n)")
        assert current_types(reader, table, ["id", "n", "s"]) == [20, 1114, 23]
        blocked = db.server.connect(db.name)
        blocked.execute("SET lock_timeout = '100ms'")
        with blocked, pytest.raises(psycopg.errors.LockNotAvailable):
            blocked.execute("ALTER TABLE t ALTER n TYPE text")


def test_read_mark_tells_what_the_read_has_seen(db: Db) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY)")
    with db.server.connect(db.name, autocommit=False) as open_conn, db.server.connect(db.name) as other:
        open_conn.execute("INSERT INTO t VALUES (1)")
        with open_conn.transaction():  # a subtransaction: the stream has only the number of the whole
            open_conn.execute("INSERT INTO t VALUES (2)")
        running = _xid(open_conn)
        other.execute("INSERT INTO t VALUES (3)")
        with db.server.connect(db.name, autocommit=False) as done:
            done.execute("INSERT INTO t VALUES (4)")
            finished = _xid(done)
            done.commit()
        with marked_read(db.conn, describe(db.conn, "public", "t")) as mark:
            rows = [r[0] for r in db.conn.execute("SELECT id FROM t ORDER BY 1")]
            with db.server.connect(db.name, autocommit=False) as late:
                late.execute("INSERT INTO t VALUES (5)")
                later = _xid(late)
                late.commit()
        assert rows == [3, 4]
        xids = np.array([running, finished, later], np.uint64).astype(np.uint32)
        assert visible(mark.low, xids).tolist() == [False, True, False]
        inserted = other.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert inserted is not None and 0 < mark.high <= parse_lsn(inserted[0])


def test_read_ends_only_when_what_it_has_seen_survives_a_crash(db: Db) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY)")
    with db.server.connect(db.name) as writer:
        writer.execute("SET synchronous_commit = off")
        for number in range(20):
            writer.execute("INSERT INTO t VALUES (%s)", (number,))
            with marked_read(db.conn, describe(db.conn, "public", "t")) as mark:
                assert len(db.conn.execute("SELECT id FROM t").fetchall()) == number + 1
            flushed = writer.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
            assert flushed is not None and parse_lsn(flushed[0]) >= mark.high


def _xid(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute("SELECT pg_current_xact_id()::text::int8").fetchone()
    assert row is not None
    return int(row[0]) % (1 << 32)


def test_failed_read_leaves_the_session_usable(db: Db) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY)")
    table = describe(db.conn, "public", "t")
    with pytest.raises(HeadwaterError, match="SOURCE_TABLE_NOT_FOUND"), marked_read(db.conn, table):
        db.conn.execute("SELECT * FROM nowhere")
    db.run("SELECT 1")


# -- publication, slot, entering --------------------------------------------------------------------------------------


def test_publication_and_slot_are_made_once_and_dropped(db: Db) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    config, t, u = db.config(), db.table("t"), db.table("u")
    assert slots.ensure_publication(db.conn, config, t) == slots.PublicationState(created=True, added=True)
    assert slots.ensure_publication(db.conn, config, t) == slots.PublicationState(created=False, added=False)
    assert slots.ensure_publication(db.conn, config, u) == slots.PublicationState(created=False, added=True)
    first = slots.ensure_slot(db.conn, config)
    again = slots.ensure_slot(db.conn, config)
    assert first.created and not again.created and first.confirmed_lsn == again.confirmed_lsn > 0
    slots.remove_table(db.conn, config, u)
    assert not slots.publishes(db.conn, config.publication, u)
    for _ in range(2):
        slots.drop_slot(db.conn, config)
        slots.drop_publication(db.conn, config)
    assert slots.slot_row(db.conn, config.slot) is None and slots.publication_of(db.conn, config.publication) is None


@pytest.mark.parametrize("what", ["ALL TABLES", "TABLES IN SCHEMA public"])
def test_existing_publication_of_everything_is_used_as_it_is(db: Db, what: str) -> None:
    if "SCHEMA" in what and db.conn.info.server_version < 150_000:
        pytest.skip("since Postgres 15")
    db.run("CREATE TABLE t (id int PRIMARY KEY)", f"CREATE PUBLICATION mine FOR {what}")
    state = slots.ensure_publication(db.conn, db.config(publication_name="mine"), db.table("t"))
    assert state == slots.PublicationState(created=False, added=False)


def test_generated_columns_are_in_the_stream_where_the_server_can_send_them_and_the_publication_says_so(db: Db) -> None:
    db.run(
        "CREATE TABLE t (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)",
        "CREATE PUBLICATION mine FOR TABLE t",
    )
    slots.ensure_publication(db.conn, db.config(), db.table("t"))
    capable = db.conn.info.server_version >= slots.GENERATED_COLUMNS_SINCE
    streamed = slots.streamed_columns(db.conn, db.config().publication, db.table("t"))
    assert streamed == ({"id", "twice"} if capable else {"id"})
    assert slots.streamed_columns(db.conn, "mine", db.table("t")) == {"id"}
    assert slots.streamed_columns(db.conn, "not yet there", db.table("t")) == streamed


def test_user_is_told_the_exact_sql_where_we_may_not_publish(db: Db) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY)")
    config = db.config(publication_create_enable="false")
    with pytest.raises(UsageError, match="SOURCE_PUBLICATION") as raised:
        slots.ensure_publication(db.conn, config, db.table("t"))
    statement = raised.value.hint.removeprefix("run on the source: ")
    db.run(statement)
    assert slots.ensure_publication(db.conn, config, db.table("t")).created is False


def test_table_whose_updates_would_fail_once_published_is_refused(db: Db) -> None:
    db.run("CREATE TABLE t (id int)")
    with pytest.raises(UsageError, match="SOURCE_NO_REPLICA_IDENTITY") as raised:
        slots.ensure_publication(db.conn, db.config(), db.table("t"))
    db.run(raised.value.hint.split("run on the source: ")[1])
    slots.ensure_publication(db.conn, db.config(), db.table("t"))
    db.run("INSERT INTO t VALUES (1)", "UPDATE t SET id = 2")


@pytest.mark.parametrize(
    ("columns", "identity", "remedy"),
    [
        ("id int, twice int GENERATED ALWAYS AS (id * 2) VIRTUAL", "FULL", "ALTER TABLE t ADD PRIMARY KEY (id)"),
        ("id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) VIRTUAL", "FULL", None),
        ("id int, twice int GENERATED ALWAYS AS (id * 2) STORED", "FULL", None),
        ("id int, twice int GENERATED ALWAYS AS (id * 2) STORED PRIMARY KEY", "DEFAULT", None),
    ],
    ids=["virtual", "virtual-beside-a-key", "stored", "stored-key"],
)
def test_table_whose_generated_columns_would_make_its_updates_fail_once_published_is_refused(
    db: Db, columns: str, identity: str, remedy: str | None
) -> None:
    if db.conn.info.server_version < slots.GENERATED_COLUMNS_SINCE:
        pytest.skip("since Postgres 18")
    db.run(f"CREATE TABLE t ({columns})", f"ALTER TABLE t REPLICA IDENTITY {identity}", "INSERT INTO t VALUES (1)")
    db.run("CREATE PUBLICATION mine WITH (publish_via_partition_root = true)")  # without generated columns
    config = db.config(publication_name="mine")
    with pytest.raises(UsageError, match=r"SOURCE_NO_REPLICA_IDENTITY.*twice") as raised:
        slots.ensure_publication(db.conn, config, db.table("t"))
    assert [f.sql_to_fix for f in check_source(config, ["t"]) if not f.ok] == [
        "" if remedy else raised.value.hint.removeprefix("run on the source: ") + ";"
    ]
    db.run("UPDATE t SET id = 2")  # nothing was done to the table
    if remedy is not None:
        db.run(remedy, "ALTER TABLE t REPLICA IDENTITY DEFAULT")
    else:
        db.run(raised.value.hint.removeprefix("run on the source: "))
    slots.ensure_publication(db.conn, config, db.table("t"))
    db.run("UPDATE t SET id = 3", "DELETE FROM t")
    assert [f.what for f in check_source(config, ["t"]) if not f.ok] == []


def test_a_partition_whose_changes_come_under_the_name_of_its_root_is_refused_and_noticed(db: Db) -> None:
    db.run("CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)", "CREATE TABLE leaf (id int PRIMARY KEY)")
    root, leaf, config = db.table("root"), db.table("leaf"), db.config()
    slots.ensure_publication(db.conn, config, leaf)
    assert slots.membership(db.conn, config.publication, leaf) is not None
    slots.ensure_publication(db.conn, config, root)
    assert slots.membership(db.conn, config.publication, leaf) is not None
    db.run("ALTER TABLE root ATTACH PARTITION leaf FOR VALUES FROM (0) TO (10)")
    assert slots.membership(db.conn, config.publication, leaf) is None
    assert slots.membership(db.conn, config.publication, root) is not None
    with pytest.raises(UsageError, match=r"SOURCE_PUBLICATION.*partition of public\.root"):
        slots.ensure_publication(db.conn, config, leaf)


def test_tables_that_inherit_from_a_published_one_can_still_be_written_to(db: Db) -> None:
    db.run("CREATE TABLE parent (id int PRIMARY KEY, v int)", "CREATE TABLE child () INHERITS (parent)")
    db.run("INSERT INTO parent VALUES (1, 0)", "INSERT INTO child VALUES (2, 0)")
    slots.ensure_publication(db.conn, db.config(), db.table("parent"))
    assert slots.ensure_publication(db.conn, db.config(), db.table("parent")).added is False
    db.run("UPDATE parent SET v = 1", "DELETE FROM child")  # the child has no key, and so no replica identity
    slots.withdraw_table(db.conn, db.config(), db.table("parent").oid)
    assert not slots.publishes(db.conn, db.config().publication, db.table("parent"))
    slots.ensure_publication(db.conn, db.config(), db.table("parent"))
    slots.remove_table(db.conn, db.config(), db.table("parent"))
    assert not slots.publishes(db.conn, db.config().publication, db.table("parent"))


def test_deferrable_primary_key_is_none_since_the_server_does_not_take_it_as_the_identity(db: Db) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY DEFERRABLE)", "INSERT INTO t VALUES (1)")
    assert db.table("t").key == ()
    with pytest.raises(UsageError, match="SOURCE_NO_REPLICA_IDENTITY") as raised:
        slots.ensure_publication(db.conn, db.config(), db.table("t"))
    db.run(raised.value.hint.split("run on the source: ")[1])
    slots.ensure_publication(db.conn, db.config(), db.table("t"))
    db.run("UPDATE t SET id = 2")


def test_membership_changes_with_the_options_of_the_publication(db: Db) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    before = slots.membership(db.conn, "p", db.table("t"))
    db.run("CREATE TABLE u (id int PRIMARY KEY)", "ALTER PUBLICATION p ADD TABLE u")
    assert slots.membership(db.conn, "p", db.table("t")) == before is not None
    db.run(
        "ALTER PUBLICATION p SET (publish = 'insert')", "ALTER PUBLICATION p SET (publish = 'insert, update, delete')"
    )
    assert slots.membership(db.conn, "p", db.table("t")) != before


def test_publication_with_a_row_filter_or_without_deletes_is_refused(db: Db) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY)")
    if db.conn.info.server_version >= 150_000:  # there are no row filters before
        db.run("CREATE PUBLICATION f FOR TABLE t WHERE (id > 5)")
        with pytest.raises(UsageError, match="SOURCE_PUBLICATION_FILTERED"):
            slots.ensure_publication(db.conn, db.config(publication_name="f"), db.table("t"))
    db.run("CREATE PUBLICATION i FOR TABLE t WITH (publish = 'insert')")
    with pytest.raises(UsageError, match="SOURCE_PUBLICATION"):
        slots.ensure_publication(db.conn, db.config(publication_name="i"), db.table("t"))


def test_first_read_waits_for_transactions_that_were_open_when_the_table_was_published(db: Db) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY)")
    slots.ensure_publication(db.conn, db.config(), db.table("t"))
    slots.ensure_slot(db.conn, db.config())
    with db.server.connect(db.name, autocommit=False) as old, db.server.connect(db.name, autocommit=False) as new:
        old.execute("INSERT INTO t VALUES (1)")
        mark = slots.enter_stream(db.conn)
        assert not slots.entry_satisfied(db.conn, mark)
        new.execute("INSERT INTO t VALUES (2)")
        blocking = slots.blocking_transactions(db.conn, mark)
        assert [b.pid for b in blocking] == [old.info.backend_pid]
        assert f"pid {old.info.backend_pid}" in slots.waiting_for(blocking)
        old.commit()
        assert slots.entry_satisfied(db.conn, mark), "a later transaction does not hold it up"
        assert slots.blocking_transactions(db.conn, mark) == []


# -- errors and checks ------------------------------------------------------------------------------------------------


def test_limits_that_the_database_has_for_its_users_do_not_end_our_reads(db: Db) -> None:
    limits = ["statement_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout"]
    limits += ["transaction_timeout"] * (db.conn.info.server_version >= 170_000)
    db.run(*(f"ALTER DATABASE {db.name} SET {limit} = '150ms'" for limit in limits))
    db.run(f"ALTER DATABASE {db.name} SET default_transaction_read_only = on")
    with connect(db.config()) as conn:
        conn.execute("CREATE PUBLICATION ours")  # or it could not be made
        time.sleep(0.3)
        conn.execute("BEGIN")
        conn.execute("SELECT pg_sleep(0.3)")
        time.sleep(0.3)
        conn.execute("COMMIT")


def test_wrong_password_and_wrong_database_and_closed_port_have_their_codes(db: Db) -> None:
    for options, code in [
        ({"password": "wrong"}, "SOURCE_AUTH_FAILED"),
        ({"database_name": "nowhere"}, "SOURCE_NOT_FOUND"),
        ({"port": "1"}, "SOURCE_UNREACHABLE"),
        ({"hostname": "no-such-host.invalid"}, "SOURCE_UNREACHABLE"),
    ]:
        with pytest.raises(HeadwaterError) as raised:
            connect(db.config(**options))
        assert raised.value.code == code
        assert db.server.password not in raised.value.render()


def test_check_of_a_good_source_finds_nothing_wrong(db: Db) -> None:
    db.run("CREATE TABLE t (id int PRIMARY KEY)")
    findings = check_source(db.config(), ["t"])
    assert all(f.ok for f in findings), findings
    assert len(findings) >= 8


def test_check_says_the_sql_that_mends_what_is_wrong(db: Db) -> None:
    role = f"weak_{db.name}"
    db.run(
        f"CREATE ROLE {role} LOGIN PASSWORD 'pw'",
        "CREATE SCHEMA s",
        "CREATE TABLE s.t (id int)",
        "ALTER TABLE s.t ENABLE ROW LEVEL SECURITY",
        'CREATE PUBLICATION "Pub of Headwater"',
    )
    config = db.config(username=role, password="pw")
    before = check_source(config, ["s.t", "s.missing"])
    wrong = [f for f in before if not f.ok]
    assert len(wrong) >= 5
    for finding in wrong:
        for statement in finding.sql_to_fix.split(";"):
            if statement.strip():
                db.run(statement)
    assert [f.what for f in check_source(config, ["s.t"]) if not f.ok] == []
    db.run(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_check_of_several_tables_says_statements_that_can_be_run_one_after_the_other(db: Db) -> None:
    role = f"weak_{db.name}"
    db.run(
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'pw'",
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE TABLE b (id int PRIMARY KEY)",
        "CREATE TABLE own (id int PRIMARY KEY)",
        f"GRANT SELECT ON a, b TO {role}",
        f"ALTER TABLE own OWNER TO {role}",
    )
    config = db.config(username=role, password="pw")
    fixes = [f.sql_to_fix for f in check_source(config, ["a", "b"]) if not f.ok]
    assert f'GRANT CREATE ON DATABASE "{db.name}" TO "{role}";' in fixes  # also who owns the tables needs it
    db.run(*fixes)
    assert [f.what for f in check_source(config, ["a", "b"]) if not f.ok] == []
    fixes = [f.sql_to_fix for f in check_source(config, ["own"]) if not f.ok]
    assert fixes == ['ALTER PUBLICATION "Pub of Headwater" ADD TABLE "public"."own";']  # for the publication's owner
    db.run(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_check_looks_into_an_existing_publication_and_at_columns_that_are_not_streamed(db: Db) -> None:
    db.run(
        "CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE g (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)",
        "CREATE TABLE bare (id int)",
        "CREATE PUBLICATION half FOR TABLE p, g WITH (publish = 'insert, update')",
    )
    config = db.config(publication_name="half")
    wrong = [f for f in check_source(config, ["p", "g", "bare"]) if not f.ok]
    assert {f.sql_to_fix for f in wrong} >= {
        "ALTER PUBLICATION \"half\" SET (publish = 'insert, update, delete, truncate');",
        'ALTER TABLE "public"."bare" REPLICA IDENTITY FULL;',
    }
    db.run("ALTER PUBLICATION half SET (publish = 'insert, update, delete, truncate')")
    wrong = [f for f in check_source(config, ["p"]) if not f.ok]
    assert [f.sql_to_fix for f in wrong] == ['ALTER PUBLICATION "half" SET (publish_via_partition_root = true);']
    assert "(*) leaves out what public.g does not stream: twice" in [f.what for f in check_source(config, ["g"])]
