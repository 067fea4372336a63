"""Text → statements: the grammar of docs/sql.md, and what is refused."""

from __future__ import annotations

import pytest

from headwater.errors import UsageError
from headwater.model.schema import Column
from headwater.sql import statements as s
from headwater.sql.parser import parse, same_definition


def one(text: str, dialect: str = "spark") -> s.Statement:
    (statement,) = parse(text, dialect)
    return statement


def code(text: str, dialect: str = "spark") -> str:
    with pytest.raises(UsageError) as caught:
        list(parse(text, dialect))
    return caught.value.code


def test_a_text_is_cut_at_semicolons_that_are_not_inside_strings_or_comments() -> None:
    found = list(parse("SELECT ';' AS a; -- one; two\nSELECT 2 /* ; */;; "))
    assert [type(x) for x in found] == [s.Query, s.Query]
    assert found[0].text == "SELECT ';' AS a"


def test_an_error_in_a_later_statement_does_not_hide_an_earlier_one() -> None:
    statements = parse("SELECT 1; SELEC 2")
    assert isinstance(next(statements), s.Query)
    with pytest.raises(UsageError):
        next(statements)


def test_create_table_gives_columns_types_and_key() -> None:
    found = one("CREATE TABLE IF NOT EXISTS t (id BIGINT, Name STRING NOT NULL, n DECIMAL(10,2), PRIMARY KEY (ID))")
    assert isinstance(found, s.CreateTable)
    assert found.columns == (
        Column("id", "BIGINT", nullable=False),
        Column("Name", "STRING", nullable=False),
        Column("n", "DECIMAL(10, 2)", nullable=True),
    )
    assert (found.name, found.key, found.if_not_exists) == ("t", ("id",), True)


def test_create_table_in_the_words_of_postgres() -> None:
    found = one("CREATE TABLE t (id INT8 PRIMARY KEY, a TEXT, b TIMESTAMPTZ, c BYTEA, d VARCHAR(10))", "postgres")
    assert isinstance(found, s.CreateTable)
    assert [c.type for c in found.columns] == ["BIGINT", "STRING", "TIMESTAMP", "BINARY", "STRING"]


def test_a_captured_table_names_its_source_and_options() -> None:
    found = one("CREATE TABLE o (*) FROM shop TABLE 'public.o' WITH (backfill.parallelism='4', snapshot = 'true')")
    assert isinstance(found, s.CreateTableFrom)
    assert (found.columns, found.source, found.external) == (None, "shop", "public.o")
    assert found.options == {"backfill.parallelism": "4", "snapshot": "true"}


def test_a_source_keeps_secrets_as_references() -> None:
    found = one("CREATE SOURCE shop WITH (connector='postgres-cdc', port=5432, password='${PGPASSWORD}')")
    assert isinstance(found, s.CreateSource)
    assert found.options == {"connector": "postgres-cdc", "port": "5432", "password": "${PGPASSWORD}"}


def test_a_sink_takes_a_relation_or_a_query_and_a_format() -> None:
    plain = one("CREATE SINK k FROM v WITH (connector='kafka') FORMAT UPSERT ENCODE JSON")
    assert isinstance(plain, s.CreateSink)
    assert (plain.source, plain.query, plain.options["format"]) == ("v", None, "upsert")
    query = one("CREATE SINK k AS WITH q AS (SELECT 1 AS a) SELECT * FROM q WITH (connector='files')")
    assert isinstance(query, s.CreateSink)
    assert query.source is None
    assert query.query is not None
    assert query.options == {"connector": "files"}


def test_two_quotes_inside_a_string_are_one_as_in_spark_4() -> None:
    found = one("INSERT INTO t VALUES ('it''s', 'a\\'b', '')")
    assert isinstance(found, s.Insert)
    assert [e.this for e in found.query.expressions[0].expressions] == ["it's", "a'b", ""]
    source = one("CREATE SOURCE x WITH (a='it''s')")
    assert isinstance(source, s.CreateSource)
    assert source.options == {"a": "it's"}


@pytest.mark.parametrize(
    "call",
    [
        "LOG10(x)",
        "TO_DATE(x, 'yyyy-MM-dd')",
        "TO_DATE(x, 'yyyy/MM/dd')",
        "TO_DATE(x)",
        "LOG2(x)",
        "TO_CHAR(x, '999')",
        "PARSE_JSON(x)",
        "PERCENTILE(x, 0.5, y)",
        "PERCENTILE_CONT(0.5) WITHIN GROUP (ORDER BY x DESC)",
        "LISTAGG(x, '') WITHIN GROUP (ORDER BY x)",
    ],
)
def test_call_that_is_read_and_written_again_means_the_same_to_spark(call: str) -> None:
    found = one("SELECT " + call.replace(", '')", ")") + " FROM t")  # no delimiter is an empty one
    assert isinstance(found, s.Query)
    assert found.query.sql(dialect="spark") == f"SELECT {call} FROM t"


@pytest.mark.parametrize(
    ("dialect", "written", "spark"),
    [
        ("postgres", "log(x)", "LOG10(x)"),
        ("mysql", "log(x)", "LN(x)"),
        ("mysql", "log10(x)", "LOG10(x)"),
        (
            "postgres",
            "percentile_disc(0.5) WITHIN GROUP (ORDER BY x)",
            "PERCENTILE_DISC(0.5) WITHIN GROUP (ORDER BY x NULLS LAST)",
        ),
        ("postgres", "extract(dow FROM x)", "(EXTRACT(DAYOFWEEK FROM x) - 1)"),
        ("postgres", "trunc(x, 2)", "CASE WHEN x < 0 THEN CEIL(x, 2) ELSE FLOOR(x, 2) END"),
        ("postgres", "regexp_replace(x, 'a', 'b', 'g')", "REGEXP_REPLACE(x, 'a', 'b')"),
        ("mysql", "date_sub(x, INTERVAL 2 HOUR)", "(x - INTERVAL '2' HOUR)"),
    ],
)
def test_call_of_another_dialect_keeps_its_meaning(dialect: str, written: str, spark: str) -> None:
    found = one(f"SELECT {written} FROM t", dialect)
    assert isinstance(found, s.Query)
    assert found.query.sql(dialect="spark") == f"SELECT {spark} FROM t"


def test_call_that_spark_cannot_express_is_refused() -> None:
    assert code("SELECT regexp_replace(x, 'a', 'b') FROM t", "postgres") == "SQL_UNTRANSLATABLE"


def test_update_and_delete_take_an_alias_and_a_condition() -> None:
    update = one("UPDATE t AS x SET a = x.a + 1, b = 'c' WHERE x.id = 1")
    assert isinstance(update, s.Update)
    assert (update.table, update.alias, [n for n, _ in update.assignments]) == ("t", "x", ["a", "b"])
    delete = one("DELETE FROM t")
    assert isinstance(delete, s.Delete)
    assert (delete.table, delete.where) == ("t", None)


def test_control_statements() -> None:
    assert [x.verb for x in parse("PAUSE; RESUME; FLUSH; WAIT; RECOVER") if isinstance(x, s.Simple)] == [
        "PAUSE",
        "RESUME",
        "FLUSH",
        "WAIT",
        "RECOVER",
    ]
    assert one("CANCEL JOBS 3, 4") == s.CancelJobs("CANCEL JOBS 3, 4", (3, 4))
    assert one("SHOW  dead letters") == s.Show("SHOW  dead letters", "DEAD LETTERS")
    alter = one("ALTER TABLE t SET BACKFILL_RATE_LIMIT = DEFAULT")
    assert alter == s.AlterJob(alter.text, "table", "t", "BACKFILL_RATE_LIMIT", None)
    system = one("ALTER SYSTEM SET barrier_interval_ms TO 500")
    assert system == s.AlterSystem(system.text, "barrier_interval_ms", "500")
    rewind = one("REWIND k TO 12")
    assert rewind == s.Maintain(rewind.text, "REWIND", "k", 12)
    drop = one("DROP MATERIALIZED VIEW IF EXISTS v CASCADE")
    assert drop == s.Drop(drop.text, "view", "v", True, True)


def test_explain_holds_the_statement_behind_it() -> None:
    found = one("EXPLAIN CREATE MATERIALIZED VIEW v AS SELECT 1 AS a")
    assert isinstance(found, s.Explain)
    assert isinstance(found.inner, s.CreateView)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SELECT 'open", "SQL_SYNTAX"),
        ("SELECT (1", "SQL_SYNTAX"),
        ("CREATE TABLE t", "SQL_SYNTAX"),
        ("CREATE TABLE t (id INT, id STRING)", "DUPLICATE_COLUMN"),
        ("CREATE TABLE t (id INT, PRIMARY KEY (nosuch))", "UNKNOWN_COLUMN"),
        ("CREATE TABLE t (id INT PRIMARY KEY, v INT, PRIMARY KEY (v))", "SQL_SYNTAX"),
        ("CREATE TABLE t (id INT PRIMARY KEY, v INT PRIMARY KEY)", "SQL_SYNTAX"),
        ("CREATE TABLE t (PRIMARY KEY (id), id INT, v INT PRIMARY KEY)", "SQL_SYNTAX"),
        ("CREATE TABLE t (id INT, PRIMARY KEY (id, ID))", "DUPLICATE_COLUMN"),
        ("CREATE TABLE t (_OP INT)", "RESERVED_NAME"),
        ("CREATE TABLE `` (id INT)", "SQL_SYNTAX"),
        ("CREATE TABLE t (`` INT)", "SQL_SYNTAX"),
        ("CREATE TABLE t (id MAP<STRING, INT> PRIMARY KEY)", "KEY_TYPE"),
        ("CREATE TABLE t (id INT DEFAULT 3)", "UNSUPPORTED_COLUMN"),
        ("CREATE TABLE t (id JSONB)", "UNKNOWN_TYPE"),
        ("CREATE OR REPLACE TABLE t (id INT)", "UNSUPPORTED_STATEMENT"),
        ("CREATE SOURCE x WITH (a='1', A='2')", "DUPLICATE_OPTION"),
        ("CREATE SOURCE x", "SQL_SYNTAX"),
        ("CREATE MATERIALIZED VIEW v AS DELETE FROM t", "SQL_SYNTAX"),
        ("INSERT OVERWRITE t VALUES (1)", "UNSUPPORTED_STATEMENT"),
        ("INSERT INTO t PARTITION (a = 1) VALUES (2)", "UNSUPPORTED_STATEMENT"),
        ("INSERT INTO t REPLACE WHERE a = 1 VALUES (2)", "UNSUPPORTED_STATEMENT"),
        ("INSERT INTO other.t VALUES (1)", "UNKNOWN_TABLE"),
        ("DELETE FROM other.t", "UNKNOWN_TABLE"),
        ("UPDATE hw_catalog.hw_jobs SET id = 1", "UNKNOWN_TABLE"),
        ("DELETE FROM t USING u WHERE t.a = u.a", "UNSUPPORTED_STATEMENT"),
        ("DELETE t WHERE a = 1", "SQL_SYNTAX"),
        ("SELECT '\ud800'", "SQL_SYNTAX"),
        ("TRUNCATE TABLE t", "UNSUPPORTED_STATEMENT"),
        ("ALTER TABLE t DROP COLUMN v", "UNSUPPORTED_STATEMENT"),
        ("ALTER TABLE t RENAME COLUMN v TO x", "UNSUPPORTED_STATEMENT"),
        ("DROP nosuch x", "SQL_SYNTAX"),
        ("PAUSE now", "SQL_SYNTAX"),
        ("CANCEL JOBS x", "SQL_SYNTAX"),
        ("REWIND k TO yesterday", "SQL_SYNTAX"),
        ("ALTER TABLE t ADD COLUMN x INT", "UNSUPPORTED_STATEMENT"),
    ],
)
def test_what_is_wrong_is_refused_with_its_code(text: str, expected: str) -> None:
    assert code(text) == expected


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("mysql", "DELETE FROM t LIMIT 1"),
        ("mysql", "DELETE FROM t WHERE a = 1 ORDER BY b"),
        ("mysql", "UPDATE t SET a = 1 LIMIT 1"),
        ("mysql", "UPDATE t JOIN u ON t.a = u.a SET t.b = 1"),
        ("mysql", "INSERT IGNORE INTO t VALUES (1)"),
        ("mysql", "INSERT INTO t VALUES (1) ON DUPLICATE KEY UPDATE a = 2"),
        ("postgres", "INSERT INTO t VALUES (1) ON CONFLICT DO NOTHING"),
        ("postgres", "INSERT INTO t VALUES (1) RETURNING a"),
        ("postgres", "UPDATE t SET a = 1 FROM u WHERE t.b = u.b"),
        ("postgres", "DELETE FROM t USING u WHERE t.a = u.a"),
    ],
)
def test_a_clause_that_would_not_be_obeyed_is_refused(dialect: str, text: str) -> None:
    assert code(text, dialect) == "UNSUPPORTED_STATEMENT"


def test_an_error_says_where() -> None:
    with pytest.raises(UsageError) as caught:
        list(parse("CREATE SOURCE x\nWHIT (a='1')"))
    assert caught.value.detail.startswith("line 2")
    assert caught.value.hint


def test_a_dialect_holds_for_the_statements_after_it() -> None:
    statements = list(parse("SELECT 'it''s'; SET dialect = 'postgres'; SELECT a::int; SET dialect = 'spark'; SELECT 1"))
    assert [type(x).__name__ for x in statements] == ["Query", "SetVariable", "Query", "SetVariable", "Query"]
    with pytest.raises(UsageError, match="UNKNOWN_DIALECT"):
        list(parse("SET dialect = 'cobol'; SELECT 1"))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("CREATE VIEW v AS SELECT 1", "create view V as\n  select 1 -- one\n;", True),
        ("CREATE SINK s FROM t WITH (topic='A')", "CREATE SINK s FROM t WITH (topic='a')", False),
        ("CREATE TABLE t (`A` INT)", "CREATE TABLE t (`a` INT)", False),
        ("CREATE TABLE t (a INT)", "CREATE TABLE t (a BIGINT)", False),
    ],
)
def test_definitions_differ_by_their_words_and_not_by_their_looks(one: str, other: str, same: bool) -> None:
    assert same_definition(one, other) is same


def test_default_is_a_value_of_settings_and_a_catalogue_s_table_can_be_described() -> None:
    assert one("ALTER SYSTEM SET retention_s = DEFAULT") == s.AlterSystem(
        "ALTER SYSTEM SET retention_s = DEFAULT", "retention_s", None
    )
    for text in ("DESCRIBE hw_catalog.hw_jobs", "DESC TABLE HW_Catalog.hw_jobs"):
        assert one(text) == s.Describe(text, "hw_jobs", catalogue=True)
    assert one("DESCRIBE hw_catalog") == s.Describe("DESCRIBE hw_catalog", "hw_catalog")


def test_an_order_inside_array_agg_is_not_lost() -> None:
    for text in ("array_agg(x ORDER BY y DESC)", "array_agg(DISTINCT x ORDER BY x) FILTER (WHERE x > 1)"):
        for dialect in ("spark", "postgres"):
            found = one(f"SELECT {text} AS a FROM t", dialect)
            assert isinstance(found, s.Query) and "ARRAY_SORT(COLLECT_LIST(" in found.query.sql(dialect="spark")
    assert code("SELECT array_agg(DISTINCT x ORDER BY y) FROM t") == "SQL_UNTRANSLATABLE"
    assert code("SELECT array_agg(x ORDER BY y) OVER (PARTITION BY z) FROM t") == "SQL_UNTRANSLATABLE"


def test_parentheses_in_strings_and_quoted_names_close_nothing() -> None:
    (sink,) = parse("CREATE SINK s AS SELECT * FROM t WHERE v = '(' WITH (connector='files')")
    assert isinstance(sink, s.CreateSink) and sink.options == {"connector": "files"}
    (table,) = parse("CREATE TABLE t (a INT COMMENT ')', `(` INT)")
    assert isinstance(table, s.CreateTable) and [c.name for c in table.columns] == ["a", "("]
