"""Options of sinks: what is refused, and that secrets stay references."""

from __future__ import annotations

import pytest

from headwater.errors import UsageError
from headwater.model.schema import Column
from headwater.sink.registry import open_sink, sink_key, sink_options

COLUMNS = (Column("id", "BIGINT", nullable=False), Column("name", "STRING"))
POSTGRES = {"connector": "postgres", "username": "u", "database.name": "d", "table.name": "t"}


def never(reference: str) -> str:
    raise AssertionError("a secret was resolved before its use")


def test_an_unknown_option_is_refused_with_the_closest_known_one() -> None:
    with pytest.raises(UsageError) as caught:
        sink_options({**POSTGRES, "tabel.name": "x"}, resolve_secret=never)
    assert caught.value.code == "SINK_OPTION_UNKNOWN"
    assert "table.name" in caught.value.hint


def test_an_unknown_connector_is_refused_with_the_closest_known_one() -> None:
    with pytest.raises(UsageError) as caught:
        sink_options({"connector": "postgre"}, resolve_secret=never)
    assert "postgres" in caught.value.hint


def test_a_literal_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        sink_options({**POSTGRES, "password": "hunter2"}, resolve_secret=never)
    assert caught.value.code == "SECRET_LITERAL"
    assert "hunter2" not in caught.value.render()


def test_a_literal_password_among_client_properties_is_refused_too() -> None:
    raw = {"connector": "kafka", "topic": "t", "properties.sasl.password": "hunter2"}
    with pytest.raises(UsageError, match="SECRET_LITERAL"):
        sink_options(raw, resolve_secret=never)


@pytest.mark.parametrize(
    "option",
    [
        *("properties.ssl.key.pem", "properties.sasl.oauthbearer.config", "properties.ssl.key.password"),
        *("schema.registry.url", "properties.bootstrap.server", "staging.path"),
    ],
)
def test_a_secret_in_clear_is_refused_wherever_it_stands(option: str) -> None:
    value = "http://user:hunter2@host" if option.endswith(("url", "server", "path")) else "hunter2"
    with pytest.raises(UsageError) as caught:
        sink_options({"connector": "kafka", "topic": "t", option: value}, resolve_secret=never)
    assert caught.value.code == "SECRET_LITERAL" and "hunter2" not in caught.value.render()


def test_the_schema_registry_takes_its_password_inside_of_the_url_by_reference() -> None:
    raw = {"connector": "kafka", "topic": "t", "schema.registry.url": "http://user:${PW}@host:8081"}
    options = sink_options(raw, resolve_secret=lambda r: "p@ss" if r == "${PW}" else r)
    assert "p@ss" not in repr(options)
    assert options.reveal("schema.registry.url") == "http://user:p%40ss@host:8081"


def test_an_option_that_resolves_nothing_takes_no_credentials() -> None:
    raw = {"connector": "delta", "path": "s3://key:${SECRET}@bucket/x"}
    with pytest.raises(UsageError, match="SINK_OPTION_INVALID"):
        sink_options(raw, resolve_secret=never)


def test_a_name_that_looks_like_a_reference_is_a_name() -> None:
    assert sink_options({**POSTGRES, "table.name": "${PG}"}, resolve_secret=never).text("table.name") == "${PG}"


def test_a_secret_is_resolved_only_where_it_is_used() -> None:
    options = sink_options({**POSTGRES, "password": "${PG}"}, resolve_secret=lambda r: "hunter2")
    assert "hunter2" not in repr(options)
    assert options.reveal("password") == "hunter2"


def test_a_missing_option_is_named() -> None:
    with pytest.raises(UsageError, match=r"table\.name"):
        sink_options({"connector": "postgres", "username": "u", "database.name": "d"}, resolve_secret=never)


def test_the_sink_key_is_the_option_else_the_visible_key_of_the_input() -> None:
    plain = sink_options({"connector": "blackhole"}, resolve_secret=never)
    named = sink_options({"connector": "blackhole", "primary_key": "name, id"}, resolve_secret=never)
    assert sink_key(plain, COLUMNS, ("id",)) == ("id",)
    assert sink_key(named, COLUMNS, ("id",)) == ("name", "id")
    with pytest.raises(UsageError, match="SINK_KEY_MISSING"):
        sink_key(plain, COLUMNS, ("_row_id",))


def test_a_key_column_of_any_name_can_be_said_in_quotes() -> None:
    raw = {"connector": "blackhole", "primary_key": 'id, "a,b" , `c``d`,"e""f", g h,'}
    assert sink_options(raw, resolve_secret=never).primary_key == ("id", "a,b", "c`d", 'e"f', "g h")


def test_a_python_sink_that_lacks_a_method_is_refused() -> None:
    raw = {"connector": "python", "class": "collections:OrderedDict"}
    with pytest.raises((UsageError, TypeError)):
        open_sink("s", raw, COLUMNS, ("id",), 1, never)
