"""What a statement may do, by who it comes from."""

from __future__ import annotations

import pytest

from headwater.errors import UsageError
from headwater.model.trust import Trust
from headwater.runtime.trust import check_trust
from headwater.sql.parser import parse

CODE = [
    "CREATE FUNCTION f RETURNS INT LANGUAGE PYTHON AS 'os:system'",
    "CREATE OR REPLACE FUNCTION f RETURNS INT LANGUAGE PYTHON AS 'os:system'",
    "CREATE SINK s FROM t WITH (connector='python', class='m:C')",
    "CREATE SINK s FROM t WITH (connector=' PYTHON ', class='m:C')",
    "CREATE SINK s AS SELECT 1 AS a WITH (connector='python', class='m:C')",
    "CREATE SOURCE s WITH (connector='postgres-cdc', password='${file:/etc/shadow}')",
    "CREATE SOURCE s WITH (connector='postgres-cdc', username='x${FILE:/etc/shadow}')",
    "CREATE TABLE t WITH (connector='delta', path='/x', storage.key='${file:/etc/shadow}')",
    "CREATE TABLE t (*) FROM s TABLE 'x' WITH (a='${file:/etc/shadow}')",
    "CREATE SINK s FROM t WITH (connector='iceberg', catalog.py-io-impl='m.C')",
    "CREATE SINK s FROM t WITH (connector='iceberg', catalog.py-catalog-impl='m.C')",
    "CREATE SINK s FROM t WITH (connector='kafka', properties.plugin.library.paths='/x.so')",
]
PLAIN = [
    "CREATE SOURCE s WITH (connector='postgres-cdc', password='${PGPASSWORD}')",
    "CREATE SINK s FROM t WITH (connector='kafka', topic='python')",
    "CREATE TABLE t (id INT)",
    "INSERT INTO t VALUES ('${file:/etc/shadow}')",
    "DROP FUNCTION f",
    "PAUSE",
]
LOOKS = ["SELECT 1", "VALUES (1)", "SHOW JOBS", "DESCRIBE t", "EXPLAIN SELECT 1", "SET dialect = 'postgres'"]


def outcome(text: str, trust: Trust, *, allow_code: bool = False) -> str:
    try:
        for statement in parse(text):
            check_trust(statement, trust, allow_code=allow_code)
    except UsageError as error:
        return error.code
    return ""


@pytest.mark.parametrize("text", CODE)
def test_code_and_files_of_secrets_are_taken_from_the_owner_or_if_the_engine_allows_it(text: str) -> None:
    code = outcome(text, Trust.OWNER)
    assert code in ("", "SQL_SYNTAX")
    assert outcome(text, Trust.ADMIN) == (code or "CODE_NOT_ALLOWED")
    assert outcome(text, Trust.ADMIN, allow_code=True) == code
    assert outcome(text, Trust.READ, allow_code=True) == (code or "READ_ONLY_TOKEN")


@pytest.mark.parametrize("text", PLAIN)
def test_every_other_statement_is_the_administrator_s(text: str) -> None:
    assert outcome(text, Trust.ADMIN) == ""
    assert outcome(text, Trust.READ) == "READ_ONLY_TOKEN"


@pytest.mark.parametrize("text", LOOKS)
def test_whoever_reads_may_look(text: str) -> None:
    assert outcome(text, Trust.READ) == ""


def test_the_refusal_says_what_to_type() -> None:
    (statement,) = parse(CODE[0])
    with pytest.raises(UsageError) as caught:
        check_trust(statement, Trust.ADMIN, allow_code=False)
    assert "--allow-python" in caught.value.hint
