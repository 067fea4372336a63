"""Every type of a real Postgres: the snapshot (COPY) and the stream (pgoutput) give the same Arrow values, the expected ones."""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.rows import dict_row

from decoded_rows import decode_rows
from headwater.connectors.postgres.copytext import decode_copy
from headwater.connectors.postgres.pgoutput import (
    DELETE,
    INSERT,
    UPDATE,
    EventBatch,
    Frames,
    Relation,
    StreamScanner,
    TransactionEnd,
    decode_events,
    layouts,
    parse_relation,
    scan_frames,
    spool_frame,
)
from headwater.connectors.postgres.rowreader import RowReader
from headwater.connectors.postgres.types import (
    COLUMNS_QUERY,
    INFINITY_DAYS,
    INFINITY_MICROS,
    MINUS_INFINITY_DAYS,
    MINUS_INFINITY_MICROS,
    SESSION_SETTINGS,
    ColumnPlan,
    PgColumn,
    TypeOptions,
    Wire,
    column_plan,
    pg_columns,
)
from headwater.connectors.postgres.wirerows import TEXT_FORM, WireRows, forms, has_binary
from headwater.errors import DefiniteError
from headwater.testing.servers import PostgresServer
from postgres_versions import EVERY_SERVER

pytestmark = pytest.mark.postgres
_names = itertools.count()
UTC = dt.UTC

# (Postgres type, Spark type, [(SQL literal, value)]); a value of type int for a date or timestamp is its Arrow integer.
TYPES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("bool", "BOOLEAN", [("true", True), ("false", False)]),
    ("int2", "SMALLINT", [("-32768", -32768), ("32767", 32767), ("0", 0)]),
    ("int4", "INT", [("-2147483648", -(2**31)), ("2147483647", 2**31 - 1), ("-7", -7)]),
    ("int8", "BIGINT", [("-9223372036854775808", -(2**63)), ("9223372036854775807", 2**63 - 1)]),
    ("oid", "BIGINT", [("4294967295", 2**32 - 1)]),
    ("float4", "FLOAT", [("'NaN'", math.nan), ("'-Infinity'", -math.inf), ("1e-45", 2**-149), ("3.4028235e38", 3.4028234663852886e38)]),
    ("float8", "DOUBLE", [("'NaN'", math.nan), ("'Infinity'", math.inf), ("5e-324", 5e-324), ("1.7976931348623157e308", 1.7976931348623157e308), ("0.1", 0.1), ("'-0'", -0.0)]),
    ("numeric(10,2)", "DECIMAL(10,2)", [("99999999.99", Decimal("99999999.99")), ("-0.01", Decimal("-0.01")), ("0", Decimal("0.00"))]),
    ("numeric(38,10)", "DECIMAL(38,10)", [("9999999999999999999999999999.9999999999", Decimal("9999999999999999999999999999.9999999999")), ("-1234567890123456789012345678.0000000001", Decimal("-1234567890123456789012345678.0000000001"))]),
    ("numeric(38)", "DECIMAL(38,0)", [("-99999999999999999999999999999999999999", Decimal("-99999999999999999999999999999999999999")), ("18446744073709551616", Decimal(2**64))]),
    ("numeric(3,3)", "DECIMAL(3,3)", [("0.999", Decimal("0.999")), ("-0.001", Decimal("-0.001"))]),
    ("numeric", "STRING", [("'NaN'", "NaN"), ("1e40", "1" + "0" * 40), ("1.500", "1.500"), ("-0.00001", "-0.00001")]),
    ("numeric(39,2)", "STRING", [("1", "1.00")]),
    ("text", "STRING", [("''", ""), (r"E'a\tb\nc\\d\r\b\f' || chr(11)", "a\tb\nc\\d\r\b\f\v"), ("'\\N'", "\\N"), ("'grüße 漢字 🎈'", "grüße 漢字 🎈"), ("'NULL'", "NULL"), ("'\\.'", "\\.")]),
    ("varchar(5)", "STRING", [("'abc'", "abc")]),
    ("char(5)", "STRING", [("'ab'", "ab   ")]),
    ('"char"', "STRING", [("'x'", "x")]),
    ("name", "STRING", [("'some_name'", "some_name")]),
    ("bytea", "BINARY", [("''", b""), (r"'\x00ff10'", b"\x00\xff\x10")]),
    ("date", "DATE", [("'2024-02-29'", dt.date(2024, 2, 29)), ("'infinity'", INFINITY_DAYS), ("'-infinity'", MINUS_INFINITY_DAYS), ("'0001-01-01 BC'", -719528), ("'5874897-12-31'", 2145042905), ("'4713-01-01 BC'", -2440550)]),
    ("timestamp", "TIMESTAMP_NTZ", [("'2024-02-29 23:59:59.999999'", dt.datetime(2024, 2, 29, 23, 59, 59, 999999)), ("'infinity'", INFINITY_MICROS), ("'-infinity'", MINUS_INFINITY_MICROS), ("'0001-12-31 23:59:59.5 BC'", -62135596800500000), ("'294247-01-10 04:00:54.775806'", INFINITY_MICROS - 1), ("'1969-12-31 23:59:59.1'", -900000), ("'4713-01-01 00:00 BC'", -2440550 * 86400000000)]),
    ("timestamptz", "TIMESTAMP", [("'2024-02-29 23:59:59.999999+05:30'", dt.datetime(2024, 2, 29, 18, 29, 59, 999999, tzinfo=UTC)), ("'infinity'", INFINITY_MICROS), ("'-infinity'", MINUS_INFINITY_MICROS), ("'12024-01-01 00:00+00'", 317273587200000000)]),
    ("time", "STRING", [("'24:00'", "24:00:00"), ("'01:02:03.000004'", "01:02:03.000004")]),
    ("timetz", "STRING", [("'01:02:03+05:30'", "01:02:03+05:30")]),
    ("interval", "STRING", [("'1 year 2 months -3 days 04:05:06.7'", "1 year 2 mons -3 days +04:05:06.7")]),
    ("uuid", "STRING", [("'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")]),
    ("json", "STRING", [("'{\"b\": 1, \"a\": [\"\\\\n\"]}'", '{"b": 1, "a": ["\\\\n"]}')]),
    ("jsonb", "STRING", [("'{\"b\": 1, \"a\": null}'", '{"a": null, "b": 1}')]),
    ("xml", "STRING", [("'<a>&amp;</a>'", "<a>&amp;</a>")]),
    ("inet", "STRING", [("'10.0.0.1/8'", "10.0.0.1/8"), ("'::1'", "::1")]),
    ("cidr", "STRING", [("'10.0.0.0/8'", "10.0.0.0/8")]),
    ("macaddr", "STRING", [("'08-00-2b-01-02-03'", "08:00:2b:01:02:03")]),
    ("macaddr8", "STRING", [("'08:00:2b:01:02:03:04:05'", "08:00:2b:01:02:03:04:05")]),
    ("money", "STRING", [("'12.34'", "$12.34")]),
    ("bit(3)", "STRING", [("B'101'", "101")]),
    ("varbit", "STRING", [("B''", ""), ("B'10'", "10")]),
    ("point", "STRING", [("'(1.5,-2)'", "(1.5,-2)")]),
    ("line", "STRING", [("'{1,2,3}'", "{1,2,3}")]),
    ("lseg", "STRING", [("'[(0,0),(1,1)]'", "[(0,0),(1,1)]")]),
    ("box", "STRING", [("'(1,1),(0,0)'", "(1,1),(0,0)")]),
    ("path", "STRING", [("'((0,0),(1,1))'", "((0,0),(1,1))")]),
    ("polygon", "STRING", [("'((0,0),(1,1),(1,0))'", "((0,0),(1,1),(1,0))")]),
    ("circle", "STRING", [("'<(0,0),2>'", "<(0,0),2>")]),
    ("tsvector", "STRING", [("'fat:1 cat:2'", "'cat':2 'fat':1")]),
    ("tsquery", "STRING", [("'fat & cat'", "'fat' & 'cat'")]),
    ("pg_lsn", "STRING", [("'16/B374D848'", "16/B374D848")]),
    ("int4range", "STRING", [("'[1,5]'", "[1,6)"), ("'empty'", "empty")]),
    ("int4multirange", "STRING", [("'{[1,2],[5,6]}'", "{[1,3),[5,7)}")]),
    ("txid_snapshot", "STRING", [("'10:20:10,14'", "10:20:10,14")]),
    ("regclass", "STRING", [("'pg_class'", "pg_class")]),
    ("int2vector", "STRING", [("'1 2 3'", "1 2 3")]),
    ("jsonpath", "STRING", [("'$.a'", '$."a"')]),
    ("mood", "STRING", [("'so ''so'''", "so 'so'")]),
    ("pair", "STRING", [("ROW(1, 'a \"b\"')", '(1,"a ""b""")')]),
    ("amount", "DECIMAL(8,3)", [("12345.678", Decimal("12345.678"))]),
    ("amounts", "ARRAY<DECIMAL(8,3)>", [("'{1,NULL}'", [Decimal("1.000"), None])]),
    ("amounts[]", "ARRAY<ARRAY<DECIMAL(8,3)>>", [("ARRAY['{1}'::amounts, NULL, '{}'::amounts]::amounts[]", [[Decimal("1.000")], None, []])]),
    ("int4[]", "ARRAY<INT>", [("'{}'", []), ("'{1,NULL,-3}'", [1, None, -3])]),
    ("text[]", "ARRAY<STRING>", [("ARRAY['', 'NULL', NULL, 'a,b', '{x}', E'q\"\\\\\\t\\n', 'null']", ["", "NULL", None, "a,b", "{x}", 'q"\\\t\n', "null"])]),
    ("varchar(9)[]", "ARRAY<STRING>", [("ARRAY['ü']", ["ü"])]),
    ("bool[]", "ARRAY<BOOLEAN>", [("'{t,f,NULL}'", [True, False, None])]),
    ("numeric(6,2)[]", "ARRAY<DECIMAL(6,2)>", [("'{1,-2.5}'", [Decimal("1.00"), Decimal("-2.50")])]),
    ("float8[]", "ARRAY<DOUBLE>", [("'{1.5,Infinity,NULL}'", [1.5, math.inf, None])]),
    ("bytea[]", "ARRAY<BINARY>", [(r"ARRAY['\x01ff'::bytea, '\x']", [b"\x01\xff", b""])]),
    ("date[]", "ARRAY<DATE>", [("'{2024-01-01}'", [dt.date(2024, 1, 1)])]),
    ("timestamptz[]", "ARRAY<TIMESTAMP>", [("'{\"2024-01-01 00:00:00+00\"}'", [dt.datetime(2024, 1, 1, tzinfo=UTC)])]),
    ("jsonb[]", "ARRAY<STRING>", [("ARRAY['{\"a\": \"x,y\"}'::jsonb]", ['{"a": "x,y"}'])]),
    ("box[]", "ARRAY<STRING>", [("ARRAY['(1,1),(0,0)'::box, '(2,2),(1,1)'::box]", ["(1,1),(0,0)", "(2,2),(1,1)"])]),
    ("mood[]", "ARRAY<STRING>", [("'{sad,\"so ''so''\"}'", ["sad", "so 'so'"])]),
    ("int4range[]", "ARRAY<STRING>", [("ARRAY['[1,5)'::int4range]", ["[1,5)"])]),
]  # fmt: skip

# One value of each type that a column can have; types whose input function refuses everything are in NO_VALUES.
BUILT_IN: dict[str, str] = {
    "aclitem": "=r/postgres", "bit": "1", "bool": "t", "box": "(1,1),(0,0)", "bpchar": "a b ", "bytea": "\\x00ff",
    "char": "c", "cid": "7", "cidr": "10.0.0.0/8", "circle": "<(0,0),2.5>", "date": "2024-02-29",
    "datemultirange": "{[2024-01-01,2024-01-03)}", "daterange": "[2024-01-01,infinity)", "float4": "1.1",
    "float8": "0.30000000000000004", "inet": "::1/64", "int2": "-1", "int2vector": "1 2", "int4": "5",
    "int4multirange": "{[1,3),[5,7)}", "int4range": "[1,5)", "int8": "9223372036854775807",
    "int8multirange": "{[1,3)}", "int8range": "(,5)", "interval": "1 mon -2 days 03:00:00.5",
    "json": '{"a" : "\\t"}', "jsonb": '{"a": [1, null]}', "jsonpath": "$.a[*]", "line": "{1,2,3}",
    "lseg": "[(0,0),(1,1)]", "macaddr": "08:00:2b:01:02:03", "macaddr8": "08:00:2b:01:02:03:04:05",
    "money": "-1234.56", "name": "n", "numeric": "1.500", "nummultirange": "{[1.5,2)}", "numrange": "[1.5,)",
    "oid": "4294967295", "oidvector": "1 2", "path": "[(0,0),(1,1)]", "pg_lsn": "16/B374D848",
    "pg_snapshot": "10:20:10,14", "point": "(0.1,-2)", "polygon": "((0,0),(1,1))", "refcursor": "c",
    "regclass": "pg_class", "regcollation": '"C"', "regconfig": "english", "regdictionary": "simple",
    "regnamespace": "pg_catalog", "regoper": "||/", "regoperator": "+(integer,integer)", "regproc": "now",
    "regprocedure": "abs(integer)", "regrole": "postgres", "regtype": "integer", "text": "a\tb\\\n", "tid": "(0,1)",
    "time": "24:00:00", "timestamp": "2024-02-29 01:02:03.000004", "timestamptz": "2024-02-29 01:02:03+05:30",
    "timetz": "01:02:03+05:30", "tsmultirange": '{["2024-01-01 00:00:00","2024-01-02 00:00:00")}',
    "tsquery": "'a' & !'b'", "tsrange": '["2024-01-01 00:00:00",)', "tstzmultirange": "{}",
    "tstzrange": '["2024-01-01 00:00:00+03",)', "tsvector": "'a':1A 'b c':2", "txid_snapshot": "10:20:",
    "uuid": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "varbit": "0101", "varchar": "v", "xid": "4294967295",
    "xid8": "18446744073709551615", "xml": "<a>&amp;</a>",
}  # fmt: skip
NO_VALUES = {
    "gtsvector", "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary", "pg_dependencies", "pg_mcv_list",
    "pg_ndistinct", "pg_node_tree",
}  # fmt: skip

SETUP = """
CREATE TYPE mood AS ENUM ('sad', 'so ''so''');
CREATE TYPE pair AS (a int, b text);
CREATE DOMAIN money_like AS numeric(8,3);
CREATE DOMAIN amount AS money_like CHECK (VALUE > -100000);
CREATE DOMAIN amounts AS amount[];
"""


class Source:
    """A database of its own with a publication of all tables and a slot."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.conn = conn
        self.slot = f"slot_{next(_names)}"
        self.scanner = StreamScanner()
        for name, value in SESSION_SETTINGS.items():
            conn.execute(f"SET {name} = '{value}'".encode())
        conn.execute(b"CREATE PUBLICATION p FOR ALL TABLES")

    def listen(self) -> None:
        self.conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [self.slot])

    def columns(self, table: str) -> tuple[PgColumn, ...]:
        return pg_columns(self.conn.cursor(row_factory=dict_row).execute(COLUMNS_QUERY.encode(), [table]).fetchall())

    def plans(self, table: str, options: TypeOptions | None = None) -> list[ColumnPlan]:
        return [column_plan(c, options or TypeOptions()) for c in self.columns(table)]

    def snapshot(self, table: str, plans: list[ColumnPlan]) -> pa.Table:
        names = ", ".join(f'"{p.name}"' for p in plans)
        statement = f"COPY (SELECT {names} FROM {table} ORDER BY 1) TO STDOUT"
        return pa.Table.from_batches([decode_copy(block, plans) for block in RowReader(self.conn, statement)])

    def binary_snapshot(self, table: str, plans: list[ColumnPlan]) -> pa.Table:
        """The columns that have a binary form."""
        plans = [p for p in plans if p.wire is not Wire.TEXT_ONLY]
        assert has_binary(plans)
        names = ", ".join(f'"{p.name}"' for p in plans)
        statement = f"COPY (SELECT {names} FROM {table} ORDER BY 1) TO STDOUT (FORMAT binary)"
        pieces = RowReader(self.conn, statement).messages(most_bytes=1 << 20)
        return pa.Table.from_batches([decode_rows(WireRows.of(piece), plans) for piece in pieces])

    def selected(self, table: str, plans: list[ColumnPlan], chosen: tuple[int, ...] | None = None) -> pa.Table:
        """As a copy without encryption reads them: each column in the form that was chosen for it."""
        names = ", ".join(f'"{p.name}"' for p in plans)
        chosen = chosen or forms(plans)
        pieces = RowReader(self.conn, f"SELECT {names} FROM {table} ORDER BY 1", forms=chosen).messages(
            most_bytes=1 << 20
        )
        return pa.Table.from_batches([decode_rows(WireRows.of(piece, chosen), plans) for piece in pieces])

    def spool(self) -> Frames:
        rows = self.conn.execute(
            "SELECT lsn - '0/0'::pg_lsn, data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', 'p')",
            [self.slot],
        ).fetchall()
        for _, message in rows:
            self.scanner.feed(message)
        return scan_frames(b"".join(spool_frame(int(lsn), message) for lsn, message in rows))

    def relation(self, table: str) -> Relation:
        oid = self.conn.execute("SELECT %s::regclass::oid", [table]).fetchone()[0]  # type: ignore[index]
        return parse_relation(self.scanner.relations[oid])

    def events(self, table: str, plans: list[ColumnPlan]) -> EventBatch:
        frames = self.spool()
        return decode_events(None, self.relation(table), plans, frames=frames)


@pytest.fixture(params=EVERY_SERVER)
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    server: PostgresServer = request.getfixturevalue(request.param)
    name = f"types_{next(_names)}"
    server.create_database(name)
    with server.connect(name) as conn:
        made = Source(conn)
        yield made
        conn.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", [made.slot]
        )


def _values(array: pa.Array) -> list[Any]:
    """As Python values, and as integers where Python has no such date."""
    if pa.types.is_date(array.type):
        array = array.cast(pa.int32())
    elif pa.types.is_timestamp(array.type):
        array = array.cast(pa.int64())
    return list(array.to_pylist())


def _plain(value: Any) -> Any:
    """An expected date or timestamp as its Arrow integer."""
    match value:
        case dt.datetime():
            return round(
                (value.replace(tzinfo=UTC) - dt.datetime(1970, 1, 1, tzinfo=UTC)) / dt.timedelta(microseconds=1)
            )
        case dt.date():
            return (value - dt.date(1970, 1, 1)).days
    return value


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return (math.isnan(left) and math.isnan(right)) or (
            left == right and math.copysign(1, left) == math.copysign(1, right)
        )
    return bool(left == right)


def test_every_type_gives_the_expected_values_by_snapshot_and_by_stream(source: Source) -> None:
    types = [t for t in TYPES if t[0] != "xml" or _has_xml(source)]
    source.conn.execute(SETUP.encode())
    columns = ", ".join(f"c{i} {kind}" for i, (kind, _, _) in enumerate(types))
    source.conn.execute(f"CREATE TABLE every_type (id int PRIMARY KEY, {columns})".encode())
    source.listen()
    depth = max(len(values) for *_, values in types) + 1  # the last row is all NULL
    for row in range(depth):
        literals = [values[row][0] if row < len(values) else "NULL" for *_, values in types]
        source.conn.execute(f"INSERT INTO every_type VALUES ({row}, {', '.join(literals)})".encode())
    plans = source.plans("every_type")
    assert [p.ddl_type for p in plans] == ["INT"] + [ddl for _, ddl, _ in types]
    snapshot = source.snapshot("every_type", plans)
    events = source.events("every_type", plans)
    assert events.op.tolist() == [INSERT] * depth
    for i, (kind, _, values) in enumerate(types, 1):
        streamed = events.new.column(i)
        copied = snapshot.column(i).combine_chunks()
        streamed.validate(full=True)
        assert str(streamed) == str(copied) and streamed.type == copied.type == plans[i].arrow_type, kind
        got = _values(streamed)
        expected = [_plain(v) if not isinstance(v, list) else v for _, v in values]
        assert len(got) == depth
        for value, want in itertools.zip_longest(got, expected):
            assert _same(value, want), (kind, value, want)
    rows = events.changes().rows
    assert [str(rows.column(p.name)) for p in plans] == [str(events.new.column(p.name)) for p in plans]
    binary = source.binary_snapshot("every_type", plans)
    assert binary.num_columns > 20
    for name in binary.column_names:
        copied, expected = binary.column(name).combine_chunks(), snapshot.column(name).combine_chunks()
        copied.validate(full=True)
        assert str(copied) == str(expected) and copied.type == expected.type, name
    for chosen in (forms(plans), (TEXT_FORM,) * len(plans)):
        selected = source.selected("every_type", plans, chosen)
        selected.validate(full=True)
        for name in snapshot.column_names:
            # As text: NaN is not equal to itself.
            assert str(selected.column(name)) == str(snapshot.column(name)), name
        assert selected.schema == snapshot.schema


def test_no_built_in_type_is_left_out_and_snapshot_and_stream_agree_on_each_and_on_its_array(source: Source) -> None:
    found = source.conn.execute(
        "SELECT typname::text FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace"
        " AND typtype IN ('b', 'r', 'm') AND typoutput <> 'array_out'::regproc"
    ).fetchall()
    types = {name for (name,) in found} - NO_VALUES
    assert types == set(BUILT_IN)
    names = sorted(types if _has_xml(source) else types - {"xml"})
    columns = ", ".join(f'"{n}_" pg_catalog."{n}", "{n}_s" pg_catalog."{n}"[]' for n in names)
    source.conn.execute(f"CREATE TABLE t (id int PRIMARY KEY, {columns})".encode())
    source.listen()
    values = ", ".join(f'%(v_{n})s::pg_catalog."{n}", ARRAY[%(v_{n})s, NULL]::pg_catalog."{n}"[]' for n in names)
    given = {f"v_{n}": BUILT_IN[n] for n in names}
    source.conn.execute(f"INSERT INTO t VALUES (1, {values})".encode(), given)
    source.conn.execute("INSERT INTO t VALUES (2)")
    plans = source.plans("t")
    snapshot, events = source.snapshot("t", plans), source.events("t", plans)
    assert pa.Table.from_batches([events.new]).equals(snapshot)
    binary = source.binary_snapshot("t", plans)
    assert binary.equals(snapshot.select(binary.column_names))
    assert source.selected("t", plans).equals(snapshot)
    for plan in plans[1:]:
        assert source.selected("t", [plans[0], plan]).equals(snapshot.select(["id", plan.name])), plan.name
    for name in names:
        one, many = (snapshot.column(f"{name}{end}").to_pylist() for end in ("_", "_s"))
        assert many == [[one[0], None], None] and one[0] is not None and one[1] is None, name


def _has_xml(source: Source) -> bool:
    try:
        source.conn.execute("SELECT '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "literal", "option", "text"),
    [
        ("numeric(5,1)", "'NaN'", "numeric.mode", "NaN"),
        ("int[]", "'{{1,2},{3,4}}'", "arrays", "{{1,2},{3,4}}"),
        ("int[]", "'[0:1]={1,2}'", "arrays", "[0:1]={1,2}"),
        ("numeric(5,1)[]", "'{NaN}'", "numeric.mode", ["NaN"]),
    ],
)
def test_value_without_a_home_is_an_error_that_names_column_and_option_and_the_option_helps(
    source: Source, kind: str, literal: str, option: str, text: Any
) -> None:
    source.conn.execute(f"CREATE TABLE t (id int PRIMARY KEY, odd {kind})".encode())
    source.conn.execute(f"INSERT INTO t VALUES (1, {literal})".encode())
    for read in (source.snapshot, source.selected):
        with pytest.raises(DefiniteError, match="column odd") as caught:
            read("t", source.plans("t"))
        assert caught.value.code == "VALUE_NOT_REPRESENTABLE" and f"{option}='string'" in caught.value.hint
        plans = source.plans("t", TypeOptions.of({option: "string"}))
        assert read("t", plans).column("odd").to_pylist() == [text]


@pytest.mark.parametrize("literal", ["'294247-01-10 04:00:54.775807'", "'294276-12-31 23:59:59.999999'"])
def test_timestamp_that_would_read_as_infinity_or_overflow_is_an_error(source: Source, literal: str) -> None:
    source.conn.execute(f"CREATE TABLE t (late timestamp); INSERT INTO t VALUES ({literal})".encode())
    for read in (source.snapshot, source.binary_snapshot, source.selected):
        with pytest.raises(DefiniteError, match="column late holds a value outside of the range"):
            read("t", source.plans("t"))


def test_numeric_of_a_thousand_digits_is_the_same_text_by_both_formats(source: Source) -> None:
    source.conn.execute(b"CREATE TABLE t (id int PRIMARY KEY, n numeric)")
    values = ["0", "-0.00", "NaN", "Infinity", "-Infinity", "0.000100", "-12345678.9", "1e130", "1e-130", "9" * 1000]
    for i, value in enumerate([*values, "1000000", "10000.0001", "-" + "7" * 300 + "." + "3" * 300]):
        source.conn.execute("INSERT INTO t VALUES (%s, %s::numeric)", [i, value])
    plans = source.plans("t")
    assert source.binary_snapshot("t", plans).equals(source.snapshot("t", plans))
    assert source.selected("t", plans).equals(source.snapshot("t", plans))


def test_columns_tell_key_order_not_null_generated_and_collation(source: Source) -> None:
    found = source.conn.execute("SELECT collname FROM pg_collation WHERE collprovider = 'i' LIMIT 1").fetchone()
    collation = found[0] if found else "C"
    source.conn.execute(
        f'CREATE TABLE t (a text COLLATE "C", b int, c text COLLATE "{collation}", gone int, PRIMARY KEY (b, a),'
        " d int GENERATED ALWAYS AS (b + 1) STORED); ALTER TABLE t DROP gone".encode()
    )
    a, b, c, d = source.columns("t")
    assert (a.key_position, b.key_position, c.key_position) == (1, 0, None)
    assert a.not_null and not c.not_null and d.generated and not b.generated
    assert (a.collation_reproducible, b.collation_reproducible, c.collation_reproducible) == (True, True, not found)
    assert (a.type_name, a.typtype) == ("text", "b")


def test_columns_that_the_primary_key_only_includes_are_not_part_of_the_key(source: Source) -> None:
    source.conn.execute(b"CREATE TABLE t (x int, b text, a int, PRIMARY KEY (a, b) INCLUDE (x))")
    source.listen()
    assert [(c.name, c.key_position) for c in source.columns("t")] == [("x", None), ("b", 1), ("a", 0)]
    source.conn.execute(b"INSERT INTO t VALUES (1, 'b', 2)")
    source.conn.execute(b"UPDATE t SET x = 9")
    events = source.events("t", source.plans("t"))
    assert not events.key_changed.any() and events.old.schema.names == ["a", "b"]


def test_update_of_the_key_is_a_delete_of_the_old_and_an_insert_of_the_new(source: Source) -> None:
    source.conn.execute(
        b"CREATE TABLE t (id int PRIMARY KEY, big text, n int); ALTER TABLE t ALTER big SET STORAGE EXTERNAL"
    )
    source.listen()
    source.conn.execute(b"INSERT INTO t VALUES (1, repeat('x', 9000), 1)")
    source.conn.execute(b"UPDATE t SET n = 2")
    source.conn.execute(b"UPDATE t SET id = 5")
    source.conn.execute(b"DELETE FROM t")
    plans = source.plans("t")
    events = source.events("t", plans)
    assert events.op.tolist() == [INSERT, UPDATE, UPDATE, DELETE]
    assert events.key_changed.tolist() == [False, False, True, False]
    assert events.unchanged["big"].tolist() == [False, True, True, False]
    changes = events.changes()
    rows = changes.rows.to_pydict()
    assert rows["_op"] == [1, 1, 2, 1, 2]
    assert rows["id"] == [1, 1, 1, 5, 5]
    assert rows["n"] == [1, 2, None, 2, None]
    assert rows["_hw_order"] == sorted(set(rows["_hw_order"]))
    assert changes.unchanged["big"].tolist() == [False, True, False, True, False]
    assert changes.before.to_pydict() == {"id": [1, 1, 1, 1, 5]}
    assert len(set(rows["_hw_commit_end_lsn"])) == len(set(rows["_hw_xid"])) == 4


def test_full_identity_fills_unchanged_values_and_a_table_without_key_has_its_old_rows(source: Source) -> None:
    source.conn.execute(
        b"CREATE TABLE t (id int, big text); ALTER TABLE t REPLICA IDENTITY FULL, ALTER big SET STORAGE EXTERNAL"
    )
    source.listen()
    source.conn.execute(b"INSERT INTO t VALUES (1, repeat('x', 9000))")
    source.conn.execute(b"UPDATE t SET id = NULL")
    events = source.events("t", source.plans("t"))
    assert not events.unchanged["big"].any() and events.key_changed.tolist() == [False, True]
    rows = events.changes().rows.to_pydict()
    assert (rows["_op"], rows["id"]) == ([1, 2, 1], [1, 1, None])
    assert [len(v) for v in rows["big"]] == [9000] * 3


def test_toasted_key_that_does_not_change_is_taken_from_the_old_tuple(source: Source) -> None:
    source.conn.execute(b"CREATE TABLE t (id int, k text NOT NULL, n int, UNIQUE (id))")
    source.conn.execute(b"ALTER TABLE t REPLICA IDENTITY FULL, ALTER k SET STORAGE EXTERNAL")
    source.listen()
    source.conn.execute(b"INSERT INTO t VALUES (1, repeat('k', 9000), 1)")
    source.conn.execute(b"UPDATE t SET n = 2")
    plans = [
        ColumnPlan(p.name, p.ddl_type, p.kind, type_oid=p.type_oid, key_position=0 if p.name == "k" else None)
        for p in source.plans("t")
    ]
    events = source.events("t", plans)
    assert events.key_changed.tolist() == [False, False]
    assert [len(v) for v in events.new.column("k").to_pylist()] == [9000, 9000]


def test_key_outside_of_the_replica_identity_is_refused_and_not_guessed(source: Source) -> None:
    source.conn.execute(b"CREATE TABLE t (id int PRIMARY KEY, other int NOT NULL UNIQUE)")
    source.conn.execute(b"ALTER TABLE t REPLICA IDENTITY USING INDEX t_other_key")
    source.listen()
    source.conn.execute(b"INSERT INTO t VALUES (1, 1)")
    source.conn.execute(b"UPDATE t SET id = 2")
    frames = source.spool()
    with pytest.raises(DefiniteError) as caught:
        decode_events(None, source.relation("t"), source.plans("t"), frames=frames)
    assert caught.value.code == "REPLICA_IDENTITY_MISSING"


def test_transactions_and_truncates_are_found_with_their_positions(source: Source) -> None:
    source.conn.execute(b"CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
    source.listen()
    with source.conn.transaction():
        source.conn.execute(b"INSERT INTO t SELECT generate_series(1, 3)")
        source.conn.execute(b"INSERT INTO u VALUES (1)")
        source.conn.execute(b"TRUNCATE t, u")
        source.conn.execute(b"INSERT INTO t VALUES (9)")
        xid = source.conn.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()[0]  # type: ignore[index]
    source.conn.execute("SELECT pg_logical_emit_message(true, 'a', 'b')")
    source.conn.execute(b"TRUNCATE u")
    frames = source.spool()
    ends = frames.transactions.commit_end_lsn
    assert frames.transactions.xid[0] == xid
    assert (ends[1:] > ends[:-1]).all() and (frames.transactions.last[:-1] == frames.transactions.first[1:]).all()
    t = decode_events(None, source.relation("t"), source.plans("t"), frames=frames)
    assert t.new.column("id").to_pylist() == [1, 2, 3, 9]
    assert len(t.truncates.order) == 1 and t.order[2] < t.truncates.order[0] < t.order[3]
    assert set(t.xid) == {xid} and set(t.commit_end_lsn) == {ends[0]}
    u = decode_events(None, source.relation("u"), source.plans("u"), frames=frames)
    assert len(u) == 1 and len(u.truncates.order) == 2 and u.truncates.commit_end_lsn[1] == ends[-1]
    age = abs(frames.transactions.commit_micros[0] / 1e6 - dt.datetime.now(UTC).timestamp())
    assert age < 3600


def test_change_of_the_tables_shape_cuts_the_stream(source: Source) -> None:
    source.conn.execute(b"CREATE TABLE t (id int PRIMARY KEY, a int)")
    source.listen()
    before = source.plans("t")
    source.conn.execute(b"INSERT INTO t VALUES (1, 1)")
    source.conn.execute(b"ALTER TABLE t DROP a, ADD b text")
    source.conn.execute(b"INSERT INTO t VALUES (2, 'x')")
    frames = source.spool()
    oid = source.relation("t").oid
    first = parse_relation(frames.message(int((frames.relations == oid).argmax())))
    with pytest.raises(DefiniteError, match="definition changes"):
        decode_events(None, first, before, frames=frames)
    (one, *span), (two, *rest) = layouts(frames, first)
    assert [c.name for c in one.columns] == ["id", "a"] and [c.name for c in two.columns] == ["id", "b"]
    assert decode_events(None, one, before, frames=frames, first=span[0], last=span[1]).new.to_pydict() == {
        "id": [1],
        "a": [1],
    }
    with pytest.raises(DefiniteError, match="column a is not in the stream"):
        decode_events(None, two, before, frames=frames, first=rest[0], last=rest[1])
    late = decode_events(None, two, source.plans("t"), frames=frames, first=rest[0], last=rest[1])
    assert late.new.to_pydict() == {"id": [2], "b": ["x"]}


def test_scanner_sees_the_end_that_the_server_reports(source: Source) -> None:
    source.conn.execute(b"CREATE TABLE t (id int PRIMARY KEY)")
    source.listen()
    source.conn.execute(b"INSERT INTO t VALUES (1)")
    frames = source.spool()
    scanner = StreamScanner()
    events = [e for i in range(frames.kinds.size) if isinstance(e := scanner.feed(frames.message(i)), TransactionEnd)]
    many = StreamScanner().feed_many(frames.data, frames.starts, frames.lengths)
    assert [e.end_lsn for e in events] == frames.transactions.commit_end_lsn.tolist()
    assert [e for _, e in many if isinstance(e, TransactionEnd)] == events
    assert [i + 1 for i, e in many if isinstance(e, TransactionEnd)] == frames.transactions.last.tolist()


def test_generated_columns_are_in_the_stream_where_the_publication_has_them(source: Source) -> None:
    if source.conn.info.server_version < 180000:
        pytest.skip("since Postgres 18")
    source.conn.execute(b"ALTER PUBLICATION p SET (publish_generated_columns = stored)")
    source.conn.execute(b"CREATE TABLE t (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED)")
    source.listen()
    source.conn.execute(b"INSERT INTO t VALUES (4)")
    plans = source.plans("t")
    assert source.events("t", plans).new.to_pydict() == source.snapshot("t", plans).to_pydict() == {"id": [4], "g": [8]}


# ruff: noqa: E501
