"""Names that a target cannot have are refused before anything is made or connected to, in words that say which."""

from __future__ import annotations

from typing import Any

import psycopg
import pymysql
import pytest

from headwater.connectors.mysql.sink import _translate
from headwater.connectors.postgres.sink import translate
from headwater.connectors.postgres.sink_sql import Names
from headwater.errors import DefiniteError, TransientError, UsageError
from headwater.model.schema import Column
from headwater.sink.names import shown
from headwater.sink.registry import open_sink

LOGIN = {"hostname": "127.0.0.1", "port": "1", "username": "u", "database.name": "d"}
TARGETS: dict[str, dict[str, str]] = {
    "postgres": {**LOGIN, "table.name": "t"},
    "mysql": {**LOGIN, "table.name": "t"},
    "kafka": {"properties.bootstrap.server": "127.0.0.1:1", "topic": "t"},
    "delta": {"path": "/nowhere/at/all"},
}


def validated(connector: str, column: str = "v", **more: str) -> Any:
    columns = (Column("id", "BIGINT", nullable=False), Column(column, "STRING"))
    options = {"connector": connector, **TARGETS[connector], **{k.replace("_", "."): v for k, v in more.items()}}
    sink = open_sink("s", options, columns, ("id",), 1, str)
    sink.validate(columns, ("id",))


@pytest.mark.parametrize(
    ("connector", "names"),
    [
        *(
            ("postgres", {"column": "x" * 64}),
            ("postgres", {"schema_name": "ü" * 32}),
            ("postgres", {"table_name": "\0"}),
        ),
        *(("mysql", {"column": "x" * 65}), ("mysql", {"table_name": "t "}), ("mysql", {"column": "\U0001f300"})),
        *(
            ("kafka", {"topic": "a b"}),
            ("kafka", {"topic": ".."}),
            ("kafka", {"topic": "ü"}),
            ("kafka", {"topic": "t/1"}),
        ),
        *(("kafka", {"topic": "x" * 250}), ("kafka", {"progress_topic": "%"}), ("delta", {"path": "/a\\b"})),
        *(("delta", {"column": name}) for name in (" ", "a,b", "a;b", "{", "}", "(", ")", "a\nb", "a\tb", "a=b")),
    ],
)
def test_a_name_that_the_target_cannot_have_is_refused_before_it_is_connected_to(
    connector: str, names: dict[str, str]
) -> None:
    with pytest.raises(UsageError) as caught:
        validated(connector, **names)
    assert caught.value.code == "SINK_NAME_REFUSED"
    assert caught.value.detail and caught.value.hint


def test_a_name_in_a_message_has_no_control_characters() -> None:
    assert shown("a\x1b[31m\nb") == "'a\\x1b[31m\\nb'"
    assert len(shown("x" * 1000)) < 100


def test_a_schema_with_a_quote_is_looked_up_as_it_is_made() -> None:
    names = Names("s", 'a"b.%', "t", ("id",), ("id",))
    assert names.progress_text() == '"a""b.%"."headwater_progress"'


@pytest.mark.parametrize("kind", [psycopg.ProgrammingError, psycopg.NotSupportedError])
def test_what_the_client_of_postgres_itself_refuses_is_no_lost_connection(kind: type[psycopg.Error]) -> None:
    error = translate(kind("only '%s', '%b', '%t' are allowed as placeholders"), "s")
    assert isinstance(error, DefiniteError) and error.code == "SINK_FAILED"
    assert isinstance(translate(psycopg.OperationalError("server closed the connection"), "s"), TransientError)


@pytest.mark.parametrize("kind", [pymysql.err.ProgrammingError, pymysql.err.NotSupportedError])
def test_what_the_client_of_mysql_itself_refuses_is_no_lost_connection(kind: Any) -> None:
    assert isinstance(_translate(kind("not all arguments converted"), "s"), DefiniteError)
    assert isinstance(_translate(pymysql.err.OperationalError(2013, "lost"), "s"), TransientError)
