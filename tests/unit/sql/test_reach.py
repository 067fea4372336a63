"""No statement reaches code, or files of the machine, wherever in it the attempt stands."""

from __future__ import annotations

import pytest

from headwater.errors import UsageError
from headwater.runtime.writes import _is_inline
from headwater.sql.binding import bind, table_names
from headwater.sql.parser import parse
from headwater.sql.reach import REFUSED, TABLE_FUNCTIONS

PATH = "text.`/etc/shadow`"
LIST = f"(SELECT collect_list(value) FROM {PATH})"

FILES = [
    f"SELECT * FROM {PATH}",
    f"SELECT * FROM spark_catalog.{PATH}",
    'SELECT * FROM "text"."/etc/shadow"',
    "SELECT * FROM a.b.c.d",
    f"TABLE {PATH}",
    f"FROM {PATH} SELECT *",
    f"FROM {PATH} |> SELECT value",
    f"SELECT * FROM (t JOIN {PATH} ON true)",
    f"SELECT * FROM t, LATERAL (SELECT * FROM {PATH})",
    f"SELECT * FROM explode({LIST})",
    f"SELECT * FROM t, explode({LIST})",
    f"SELECT * FROM t LATERAL VIEW explode({LIST}) y AS z",
    f"SELECT * FROM t LATERAL VIEW OUTER posexplode({LIST}) y AS n, z",
    f"SELECT * FROM t JOIN LATERAL explode({LIST}) ON true",
    f"SELECT * FROM inline(arrays_zip({LIST}))",
    f"SELECT * FROM stack(1, {LIST})",
    f"SELECT explode({LIST})",
    f"SELECT transform(array(1), x -> {LIST})",
    f"SELECT * FROM VALUES ({LIST})",
    f"VALUES ({LIST})",
    f"SELECT {LIST}",
    f"SELECT 1 WHERE EXISTS (SELECT 1 FROM {PATH})",
    f"SELECT 1 WHERE 'x' IN (SELECT value FROM {PATH})",
    f"SELECT * FROM t ORDER BY {LIST} LIMIT 1",
    f"SELECT count(*) FILTER (WHERE {LIST} IS NULL) FROM t",
    f"SELECT sum(a) OVER (PARTITION BY {LIST}) FROM t",
    f"SELECT * FROM (SELECT * FROM {PATH}) PIVOT (count(1) FOR value IN ('x'))",
    f"SELECT * FROM t TIMESTAMP AS OF (SELECT max(value) FROM {PATH})",
    f"SELECT * FROM t VERSION AS OF (SELECT max(value) FROM {PATH})",
    f"WITH c AS (SELECT * FROM {PATH}) SELECT * FROM c",
    f"WITH text AS (SELECT 1) SELECT * FROM {PATH}",
    f"SELECT * FROM t UNION ALL SELECT * FROM {PATH}",
    f"SELECT * FROM STREAM({PATH})",
    f"SELECT * FROM STREAM {PATH}",
    f"SELECT * FROM f(TABLE({PATH}))",
    "SELECT * FROM read_files('/etc/shadow')",
    "SELECT * FROM python_worker_logs()",
    "SELECT * FROM IDENTIFIER('text.`/etc/shadow`')",
    "SELECT * FROM IDENTIFIER('te' || 'xt.`/etc/shadow`')",
    "SELECT from_xml('<a/>', 'a INT', map('rowValidationXSDPath', '/etc/shadow'))",
    "SELECT from_xml('<a/>', 'a INT', map('row' || 'ValidationXSDPath', '/etc/shadow'))",
    r"SELECT from_xml('<a/>', 'a INT', map('\u0072owValidationXSDPath', '/etc/shadow'))",
    "SELECT schema_of_xml('<a/>', map('ROWVALIDATIONXSDPATH', '/etc/shadow'))",
    "SELECT from_protobuf(a, 'm', '/etc/shadow') FROM t",
    "SELECT from_avro(a, '{}', map('avroSchemaUrl', 'file:///etc/shadow')) FROM t",
    "SELECT input_file_name() FROM t",
    f"INSERT INTO t SELECT * FROM {PATH}",
    f"INSERT INTO t SELECT 1 WHERE EXISTS (SELECT 1 FROM {PATH})",
    f"INSERT INTO t VALUES ({LIST})",
    f"UPDATE t SET a = {LIST}",
    f"UPDATE t SET a = 1 WHERE a IN (SELECT value FROM {PATH})",
    f"DELETE FROM t WHERE a IN (SELECT value FROM {PATH})",
    f"CREATE TABLE x AS SELECT * FROM {PATH}",
    f"CREATE MATERIALIZED VIEW x AS SELECT * FROM t WHERE a IN (SELECT value FROM {PATH})",
    f"CREATE SINK x AS SELECT * FROM {PATH} WITH (connector='blackhole')",
    f"EXPLAIN SELECT * FROM explode({LIST})",
    f"SET dialect = 'postgres'; SELECT * FROM {PATH.replace('`', chr(34))}",
]

CODE = [
    "SELECT reflect('java.lang.System', 'getenv', 'X')",
    "SELECT ReFlect ('java.lang.System', 'getenv', 'X')",
    "SELECT `reflect`('java.lang.System', 'getenv', 'X')",
    "SELECT builtin.reflect('java.lang.System', 'getenv', 'X')",
    "SELECT system.builtin.java_method('java.lang.System', 'getenv', 'X')",
    "SELECT try_reflect('java.lang.System', 'getenv', 'X')",
    "SELECT IDENTIFIER('reflect')('java.lang.System', 'getenv', 'X')",
    "SELECT transform(array('X'), x -> reflect('java.lang.System', 'getenv', x))",
    "SELECT * FROM t WHERE reflect('java.lang.System', 'getenv', 'X') = a",
    "SELECT * FROM t TIMESTAMP AS OF reflect('java.lang.System', 'getenv', 'X')",
    "SELECT * FROM explode(array(reflect('java.lang.System', 'getenv', 'X')))",
    "SELECT TRANSFORM(a) USING 'sh -c id' AS (b) FROM t",
    "SELECT MAP(a) USING 'sh -c id' AS (b) FROM t",
    "FROM t MAP a USING 'sh -c id' AS b",
    "INSERT INTO t VALUES (reflect('java.lang.System', 'getenv', 'X'))",
    "INSERT INTO t SELECT java_method('java.lang.System', 'getenv', 'X')",
    "UPDATE t SET a = reflect('java.lang.System', 'getenv', 'X')",
    "DELETE FROM t WHERE reflect('java.lang.System', 'getenv', 'X') IS NOT NULL",
    "CREATE TABLE x AS SELECT reflect('java.lang.System', 'getenv', 'X') AS a",
    "EXPLAIN SELECT reflect('java.lang.System', 'getenv', 'X')",
    "EXECUTE IMMEDIATE 'SELECT reflect(1, 2)'",
]


def read_and_bind(text: str) -> None:
    for statement in parse(text):
        inner = getattr(statement, "inner", statement)
        parts = [getattr(inner, "query", None), getattr(inner, "where", None)]
        parts += [value for _, value in getattr(inner, "assignments", ())]
        for part in parts:
            if part is not None:
                bind(part)


@pytest.mark.parametrize("text", FILES + CODE)
def test_no_statement_reads_a_file_or_calls_code(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_and_bind(text)
    assert caught.value.code in ("UNKNOWN_TABLE", "FUNCTION_NOT_ALLOWED", "SQL_SYNTAX", "UNSUPPORTED_STATEMENT")


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("SELECT * FROM explode((SELECT collect_list(a) FROM t))", ["t"]),
        ("SELECT * FROM t LATERAL VIEW explode((SELECT collect_list(a) FROM u)) y AS z", ["t", "u"]),
        ("WITH u AS (SELECT 1 AS a) SELECT * FROM explode((SELECT collect_list(a) FROM u))", []),
        ("WITH u AS (SELECT * FROM u) SELECT * FROM u", ["u"]),
        ("WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 3) SELECT * FROM r", []),
        ("WITH a AS (SELECT 1 AS x), b AS (SELECT * FROM a) SELECT * FROM B JOIN A ON true", []),
        ("SELECT /*+ BROADCAST(o) */ * FROM orders AS o", ["orders"]),
        ("SELECT * FROM t, inline(array(struct(1, 2)))", ["t"]),
        ("SELECT * FROM range(3) JOIN stack(2, 1, 2) ON true", []),
        ("SELECT from_xml(a, 'x INT', map('timestampFormat', 'dd/MM/yyyy')), session_user() FROM t", ["t"]),
    ],
)
def test_what_only_computes_is_allowed_and_tables_are_bound_wherever_they_stand(text: str, tables: list[str]) -> None:
    (found,) = parse(text)
    query = found.query  # type: ignore[attr-defined]
    sql, refs = bind(query)
    assert sorted(table_names(query)) == tables
    assert [ref.placeholder for ref in refs if ref.placeholder not in sql] == []


def test_a_comment_is_never_sent_on() -> None:
    (found,) = parse(f"SELECT a -- */ UNION SELECT value FROM {PATH} /*\nFROM t")
    assert "shadow" not in bind(found.query)[0]  # type: ignore[attr-defined]


def test_no_function_is_both_allowed_and_refused() -> None:
    assert not TABLE_FUNCTIONS & set(REFUSED)


@pytest.mark.parametrize("text", ["SELECT 1 WHERE EXISTS (SELECT 1 FROM t)", "SELECT 1 WHERE 1 IN (SELECT a FROM t)"])
def test_an_insert_that_names_a_table_anywhere_is_bound(text: str) -> None:
    (found,) = parse(f"INSERT INTO x {text}")
    assert not _is_inline(found.query)  # type: ignore[attr-defined]
