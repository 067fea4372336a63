"""`init` and `check` without a server: what they write and what they refuse. test_demo.py has them with one."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import headwater
from headwater.cli import main
from headwater.cli.commands import app
from headwater.cli.setup import FoundTable, external_name, pipeline_text, source_options, sources_of, tls_options
from headwater.errors import UsageError
from headwater.sql import statements as s
from headwater.sql.parser import parse

OPTIONS = source_options("db.example", 5433, "app", "${PGPASSWORD}", "it's", "headwater", "headwater")


def written(*tables: FoundTable) -> list[s.Statement]:
    return list(parse(pipeline_text(OPTIONS, tables)))


def test_written_file_parses_to_the_source_and_its_tables() -> None:
    source, orders, other = written(FoundTable("public.orders", 10, ("id",)), FoundTable("crm.orders", 10, ("id",)))
    assert isinstance(source, s.CreateSource)
    assert source.options == OPTIONS
    assert isinstance(orders, s.CreateTableFrom)
    assert (orders.name, orders.external) == ("orders", "public.orders")
    assert isinstance(other, s.CreateTableFrom)
    assert (other.name, other.external) == ("crm_orders", "crm.orders")


def test_the_source_is_called_after_its_database_and_tables_keep_their_names() -> None:
    source, table = parse(pipeline_text({**OPTIONS, "database.name": "shop"}, [FoundTable("public.shop", 1, ("id",))]))
    assert isinstance(source, s.CreateSource)
    assert isinstance(table, s.CreateTableFrom)
    assert (source.name, table.name, table.source) == ("shop_2", "shop", "shop_2")


def test_table_that_cannot_be_captured_is_a_comment_with_its_reason() -> None:
    table = FoundTable("public.log", 10, (), "table public.log has no primary key")
    assert len(written(table)) == 1
    assert "-- public.log cannot be captured: table public.log has no primary key" in pipeline_text(OPTIONS, [table])


def test_names_that_collide_or_need_quotes_are_written_so_that_they_can_be_read_back() -> None:
    tables = [
        FoundTable(external_name("public", "Über Bestellung"), 1, ("id",)),
        FoundTable(external_name("a", "b_c"), 1, ("id",)),
        FoundTable(external_name("a_b", "c"), 1, ("id",)),
        FoundTable(external_name("public", 'dotted."name"'), 1, ("id",)),
    ]
    statements = [x for x in written(*tables) if isinstance(x, s.CreateTableFrom)]
    assert [x.name for x in statements] == ["Über Bestellung", "a_b_c", "a_b_c_2", "dotted_name"]
    assert [x.external for x in statements] == [t.external for t in tables]


def test_name_with_a_line_end_is_no_statement_of_its_own() -> None:
    name = "x\n; DROP TABLE orders; --\r"
    refused = FoundTable(external_name("public", name), 1, (name,), f"table public.{name} has no primary key")
    taken = FoundTable(external_name("public", name), 1, (name,))
    assert [type(x) for x in written(refused)] == [s.CreateSource]
    source, table = written(taken)
    assert isinstance(source, s.CreateSource) and isinstance(table, s.CreateTableFrom)
    assert table.external == taken.external and table.name.isprintable()


def test_options_for_tls_are_those_that_are_given_with_paths_that_hold_everywhere() -> None:
    assert tls_options(None, None, None, None) == {}
    found = tls_options("verify-full", "ca.pem", "/c.pem", None)
    assert found == {"ssl.mode": "verify-full", "ssl.root.cert": str(Path("ca.pem").absolute()), "ssl.cert": "/c.pem"}


def test_sources_of_a_file_come_with_their_tables() -> None:
    text = """
    CREATE SOURCE Shop WITH (connector='postgres-cdc', hostname='h', username='u', database.name='d');
    CREATE TABLE a (*) FROM shop TABLE 'public.a';
    CREATE TABLE plain (id BIGINT PRIMARY KEY);
    CREATE TABLE b (*) FROM SHOP TABLE 'public.b';
    """
    (source,) = sources_of(text)
    assert (source.name, source.tables) == ("Shop", ("public.a", "public.b"))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("CREATE TABLE a (*) FROM nowhere TABLE 'public.a'", "UNKNOWN_SOURCE"),
        ("CREATE TABLE a (id BIGINT PRIMARY KEY)", "NOTHING_TO_CHECK"),
        ("", "NOTHING_TO_CHECK"),
    ],
)
def test_file_without_a_source_to_check_is_refused(text: str, code: str) -> None:
    with pytest.raises(UsageError) as error:
        sources_of(text)
    assert error.value.code == code


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, UsageError), result.output
    return result.exception.code


def test_missing_option_is_named_when_nobody_can_be_asked(tmp_path: Path) -> None:
    assert refused("check") == "MISSING_OPTION"
    assert refused("init", str(tmp_path / "new.sql"), "--hostname", "h") == "MISSING_OPTION"


def test_existing_file_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.sql"
    file.write_text("-- mine")
    assert refused("init", str(file)) == "FILE_EXISTS"
    assert file.read_text() == "-- mine"


def test_password_in_clear_is_refused() -> None:
    arguments = ("check", "--hostname", "h", "--username", "u", "--database", "d", "--password", "hunter2")
    assert refused(*arguments) == "LITERAL_SECRET"


def test_unreachable_source_is_a_finding_and_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "x")
    # Port 1 on loopback: nobody listens there.
    result = CliRunner().invoke(
        app, ["check", "--hostname", "127.0.0.1", "--port", "1", "--username", "u", "--database", "d"]
    )
    assert result.exit_code == 1
    assert "WRONG  [SOURCE_UNREACHABLE]" in result.stdout


def test_missing_secret_is_a_finding_that_says_what_to_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    result = CliRunner().invoke(app, ["check", "--hostname", "127.0.0.1", "--username", "u", "--database", "d"])
    assert result.exit_code == 1
    assert "export PGPASSWORD" in result.stdout


# -- the entry point ------------------------------------------------------------------------------------------------


def entered(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["headwater", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_exit_code_of_a_command_is_the_exit_code_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "x")
    flags = ("--hostname", "127.0.0.1", "--port", "1", "--username", "u", "--database", "d")
    assert entered(monkeypatch, "check", *flags) == 1
    assert entered(monkeypatch, "--help") == 0


def test_without_a_command_the_help_is_shown_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entered(monkeypatch) == 2
    shown = capsys.readouterr()
    assert "Usage: headwater" in shown.out + shown.err and "error:" not in shown.err


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert entered(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"headwater {headwater.__version__}\n"


@pytest.mark.parametrize("command", [c.name or c.callback.__name__ for c in app.registered_commands if c.callback])
def test_every_command_shows_how_it_is_used(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert f"headwater {command}" in result.stdout.split("Example")[1], result.stdout


@pytest.mark.parametrize("arguments", [("frobnicate",), ("run", "--no-such-flag"), ("check", "--port", "x")])
def test_wrong_use_says_what_is_wrong_and_exits_2(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entered(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: [USAGE] ")
    assert "hint: headwater" in error


def test_the_example_of_a_sink_names_a_table_and_its_own_key() -> None:
    tables = [FoundTable("public.a", 1, ()), FoundTable("public.b", 1, ("x", "y")), FoundTable("public.c", 1, ("z",))]
    text = pipeline_text(OPTIONS, tables)
    assert "CREATE SINK my_sink FROM b WITH (connector='files', path='./out', primary_key='x,y')" in text
