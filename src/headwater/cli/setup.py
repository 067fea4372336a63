"""`headwater init` and `headwater check`: the way to a pipeline file, and what a source still lacks for it.

What is right or wrong at a source is decided by `connectors/postgres/check.py`, whether a table can be captured by
`runtime/captured_table.py`: the same code that CREATE TABLE uses. Here are only the options, the asking, and the text.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from headwater.cli.input import read_text
from headwater.cli.options import DEFAULT_DIR, DataDir
from headwater.cli.visible import TEXT, visible
from headwater.config import check_secrets
from headwater.errors import HeadwaterError, UsageError

if TYPE_CHECKING:
    from headwater.connectors.postgres.catalogue import TableInfo
    from headwater.connectors.postgres.check import Finding
    from headwater.connectors.postgres.client import PostgresConfig

CONNECTOR: Final = "postgres-cdc"
PASSWORD: Final = "${PGPASSWORD}"
_PLAIN: Final = re.compile(r"[a-z][a-z0-9_]*")

Hostname = Annotated[str | None, typer.Option("--hostname", help="host of the Postgres server")]
Port = Annotated[int, typer.Option("--port", help="its port")]
Username = Annotated[str | None, typer.Option("--username", help="the role that Headwater logs in as")]
Password = Annotated[str, typer.Option("--password", help="a reference: ${NAME} or ${file:path}; never a password")]
Database = Annotated[str | None, typer.Option("--database", help="name of the database")]
Slot = Annotated[str, typer.Option("--slot", help="name of the replication slot")]
Publication = Annotated[str, typer.Option("--publication", help="name of the publication")]
SslMode = Annotated[
    str | None, typer.Option("--ssl-mode", help="disable, allow, prefer, require, verify-ca or verify-full")
]
SslRootCert = Annotated[str | None, typer.Option("--ssl-root-cert", help="file of the authority of the server's cert")]
SslCert = Annotated[str | None, typer.Option("--ssl-cert", help="file of a client certificate")]
SslKey = Annotated[str | None, typer.Option("--ssl-key", help="file of its key")]
Tables = Annotated[list[str] | None, typer.Option("--table", help="schema.table; may be given several times")]


def register(app: typer.Typer) -> None:
    app.command()(init)
    app.command()(check)


@dataclass(frozen=True, slots=True)
class SourceToCheck:
    """A source and the tables that are to be captured from it."""

    name: str
    options: dict[str, str]
    tables: tuple[str, ...]


# -- check ----------------------------------------------------------------------------------------------------------


def check(
    file: Annotated[Path | None, typer.Argument(help="a pipeline file; its sources and tables are checked")] = None,
    hostname: Hostname = None,
    port: Port = 5432,
    username: Username = None,
    password: Password = PASSWORD,
    database: Database = None,
    slot: Slot = "headwater",
    publication: Publication = "headwater",
    ssl_mode: SslMode = None,
    ssl_root_cert: SslRootCert = None,
    ssl_cert: SslCert = None,
    ssl_key: SslKey = None,
    table: Tables = None,
    data_dir: DataDir = DEFAULT_DIR,
) -> None:
    """Say what a source still lacks, with the exact SQL to run there. Exit code 1: something is missing.

    Without a file and without a host: the sources of the data directory.

    Examples: headwater check pipeline.sql

    headwater check --hostname db --username app --database shop --table public.orders

    headwater check --data-dir /srv/headwater
    """
    if file is not None and hostname is not None:
        raise UsageError("OPTION_VALUE", "give a file or the options of a source, not both")
    if file is not None:
        sources = sources_of(read_text(file), "the file")
    elif hostname is None and data_dir.exists():
        sources = sources_of(_definitions(data_dir), str(data_dir))
    else:
        options = source_options(hostname, port, username, password, database, slot, publication)
        options |= tls_options(ssl_mode, ssl_root_cert, ssl_cert, ssl_key)
        sources = [SourceToCheck("the source", options, tuple(table or ()))]
    missing = _check_sources(sources, data_dir)
    if missing:
        sys.stderr.write(f"error: [CHECK_FAILED] {missing} thing{'s' if missing > 1 else ''} to put right\n")
        raise typer.Exit(1)


def _definitions(data_dir: Path) -> str:
    """The statements that made the sources and tables of a data directory."""
    from headwater.cli.client import session

    query = "SELECT definition FROM hw_catalog.hw_jobs WHERE kind IN ('source', 'table') ORDER BY id"
    with session(data_dir, text=query) as engine:
        found = engine.run(query)
    return "\n".join(f"{row['definition'].rstrip(';')};" for row in (found["rows"] if found else ()))


def sources_of(text: str, where: str = "the file") -> list[SourceToCheck]:
    """The sources of some statements, each with its captured tables, in their order."""
    from headwater.sql import statements as s
    from headwater.sql.parser import parse

    sources: dict[str, s.CreateSource] = {}
    tables: dict[str, list[str]] = {}
    for statement in parse(text):
        if isinstance(statement, s.CreateSource):
            sources[statement.name.lower()] = statement
        elif isinstance(statement, s.CreateTableFrom):
            tables.setdefault(statement.source.lower(), []).append(statement.external)
    for name in tables:
        if name not in sources:
            raise UsageError(
                "UNKNOWN_SOURCE", f"there is no source {name} in {where}", hint="add CREATE SOURCE, or correct FROM …"
            )
    if not sources:
        raise UsageError("NOTHING_TO_CHECK", f"{where} has no CREATE SOURCE", hint="headwater init writes one")
    return [SourceToCheck(x.name, x.options, tuple(tables.get(key, ()))) for key, x in sources.items()]


def _check_sources(sources: Sequence[SourceToCheck], data_dir: Path) -> int:
    from headwater.connectors.postgres.check import check_source

    missing = 0
    for source in sources:
        sys.stdout.write(f"{visible(source.name)}\n")
        config = _config(source.options)
        exists = functools.partial(_has_source, data_dir, config)
        for finding in check_source(config, source.tables, exists=exists):
            missing += not finding.ok
            _show(finding)
    return missing


def _has_source(data_dir: Path, config: PostgresConfig) -> bool:
    """Whether the data directory has a source with the same slot of the same server."""
    if not data_dir.exists():
        return False
    try:
        known = [_config(source.options) for source in sources_of(_definitions(data_dir), str(data_dir))]
    except HeadwaterError:
        return False
    return (config.hostname, config.port, config.slot) in [(c.hostname, c.port, c.slot) for c in known]


def _show(finding: Finding) -> None:
    sys.stdout.write(f"  {'ok   ' if finding.ok else 'WRONG'}  {visible(finding.what)}\n")
    if finding.sql_to_fix:
        sys.stdout.write(f"         run: {visible(finding.sql_to_fix, keep=TEXT)}\n")
    sys.stdout.flush()


def _config(options: dict[str, str]) -> PostgresConfig:
    from headwater.connectors.postgres.client import PostgresConfig

    if options.get("connector") != CONNECTOR:
        raise UsageError(
            "UNKNOWN_CONNECTOR",
            f"check knows no source connector {options.get('connector', '')}".rstrip(),
            hint=f"known: {CONNECTOR}",
        )
    check_secrets(options)
    return PostgresConfig.from_options(options)


def source_options(
    hostname: str | None,
    port: int,
    username: str | None,
    password: str,
    database: str | None,
    slot: str,
    publication: str,
) -> dict[str, str]:
    """The options of CREATE SOURCE; UsageError names the first that is missing."""
    for flag, value in (("--hostname", hostname), ("--username", username), ("--database", database)):
        if not value:
            raise UsageError(
                "MISSING_OPTION",
                f"option {flag} is missing",
                hint=f"add {flag} …, name a file, or a --data-dir that is there",
            )
    return {
        "connector": CONNECTOR,
        "hostname": hostname or "",
        "port": str(port),
        "username": username or "",
        "password": password,
        "database.name": database or "",
        "slot.name": slot,
        "publication.name": publication,
    }


def tls_options(mode: str | None, root_cert: str | None, cert: str | None, key: str | None) -> dict[str, str]:
    """Those that are given; a file's path from here on, wherever the engine runs."""
    files = {"ssl.root.cert": root_cert, "ssl.cert": cert, "ssl.key": key}
    given = {name: str(Path(path).absolute()) for name, path in files.items() if path}
    return {**({"ssl.mode": mode} if mode else {}), **given}


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError("FILE_UNWRITABLE", f"{path} cannot be written", detail=str(error.strerror)) from None


# -- init -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A table of the source, and why it cannot be captured (empty: it can)."""

    external: str
    rows: int
    key: tuple[str, ...]
    problem: str = ""


def init(
    output: Annotated[Path, typer.Argument(help="the file to write")] = Path("pipeline.sql"),
    hostname: Hostname = None,
    port: Port = 5432,
    username: Username = None,
    password: Password = PASSWORD,
    database: Database = None,
    slot: Slot = "headwater",
    publication: Publication = "headwater",
    ssl_mode: SslMode = None,
    ssl_root_cert: SslRootCert = None,
    ssl_cert: SslCert = None,
    ssl_key: SslKey = None,
    table: Tables = None,
    force: Annotated[bool, typer.Option("--force", help="write over an existing file")] = False,
    data_dir: DataDir = DEFAULT_DIR,
) -> None:
    """Write a commented pipeline file for a source: asks for what is not given, and lists the source's tables.

    Example: headwater init --hostname db --username app --database shop --table public.orders
    """
    if output.exists() and not force:
        raise UsageError("FILE_EXISTS", f"{output} exists already", hint="name another file, or add --force")
    if sys.stdin.isatty():
        if not hostname:
            hostname = typer.prompt("Host of the Postgres server", default="localhost", err=True)
            port = typer.prompt("Port", default=port, err=True)
        database = database or typer.prompt("Database", default="postgres", err=True)
        username = username or typer.prompt("Role", default=os.environ.get("USER", "postgres"), err=True)
    options = source_options(hostname, port, username, password, database, slot, publication)
    options |= tls_options(ssl_mode, ssl_root_cert, ssl_cert, ssl_key)
    found = _found_tables(_config(options))
    _list(found)
    wanted = _choose(found, table)
    _write(output, pipeline_text(options, wanted))
    there = "" if data_dir == DEFAULT_DIR else f" --data-dir {shlex.quote(str(data_dir))}"
    sys.stderr.write(
        f"wrote {output}\n  next: headwater check {output}   what the source still lacks\n"
        f"        headwater run {output}{there}     copy, follow, serve\n"
    )


def _found_tables(config: PostgresConfig) -> list[FoundTable]:
    from headwater.connectors.postgres.catalogue import describe, list_tables
    from headwater.connectors.postgres.client import connect

    found = []
    with connect(config, application="headwater init") as conn:
        for schema, name in list_tables(conn):
            info = describe(conn, schema, name)
            found.append(FoundTable(external_name(schema, name), info.rows, info.key, _problem(config, conn, info)))
    return found


def _problem(config: PostgresConfig, conn: Any, info: TableInfo) -> str:
    from headwater.connectors.postgres.slots import require_identity
    from headwater.runtime.captured_table import describe_table
    from headwater.sql.statements import CreateTableFrom

    try:
        require_identity(conn, info)
        describe_table(config, CreateTableFrom("", "t", None, (), "s", external_name(info.schema, info.name)))
    except HeadwaterError as error:
        if error.code == "SOURCE_PERMISSION":
            return ""  # the table can be captured once the role may read it: `check` says what to grant
        return f"{error.message}; {error.hint}" if error.hint else error.message
    return ""


def external_name(schema: str, name: str) -> str:
    """`schema.table` as CREATE TABLE … FROM reads it: parts with a point, a quote or a space are quoted."""

    def part(text: str) -> str:
        return text if re.fullmatch(r'[^\s."]+', text) else '"' + text.replace('"', '""') + '"'

    return f"{part(schema)}.{part(name)}"


def _list(found: Sequence[FoundTable]) -> None:
    sys.stderr.write(f"{len(found)} table{'' if len(found) == 1 else 's'}:\n")
    for one in found:
        rows = f"about {one.rows:,} rows" if one.rows >= 0 else "rows not counted yet"
        key = f"key ({', '.join(one.key)})" if one.key else "no key"
        note = f"  cannot be captured: {one.problem}" if one.problem else f"  {key}"
        sys.stderr.write(visible(f"  {one.external:40} {rows:>24}{note}") + "\n")


def _choose(found: list[FoundTable], names: Iterable[str] | None) -> list[FoundTable]:
    """The named tables; in a terminal the user is asked; else all of them."""
    by_name = {x.external: x for x in found} | {x.external.removeprefix("public."): x for x in found}
    wanted = list(names or ())
    if not wanted and sys.stdin.isatty():
        answer = typer.prompt("Tables to capture, with commas between (all)", default="", show_default=False, err=True)
        wanted = [part.strip() for part in answer.split(",") if part.strip() not in ("", "all")]
    for name in wanted:
        if name not in by_name:
            from headwater.config import suggestion

            raise UsageError("UNKNOWN_TABLE", f"the source has no table {name}", hint=suggestion(name, by_name))
    return [by_name[name] for name in wanted] if wanted else found


def pipeline_text(options: dict[str, str], tables: Sequence[FoundTable]) -> str:
    """The file: a source, its tables, and commented examples of what comes next."""
    taken: set[str] = set()
    named = [(_our_name(table.external, taken), table) for table in tables]
    source = _our_name(options["database.name"], taken)
    lines = [
        "-- A Headwater pipeline. `headwater run` applies it: what exists is left alone, what is new is created.",
        "-- Secrets are references: ${NAME} is read from the environment, ${file:path} from a file, when it is used.",
        "",
        "-- The source. Slot and publication are created if they are not there (`headwater check` says what is wrong).",
        f"CREATE SOURCE {source} WITH (",
        ",\n".join(f"    {name} = {_text(value)}" for name, value in options.items()),
        ");",
        "",
        "-- The tables: each is copied while it is written to, then followed. Options, with their defaults:",
        "--   WITH (backfill.parallelism='4', backfill.num_rows_per_split='100000', snapshot='true')",
        "--   and backfill.rate_limit='10000' (rows/s; unlimited if left out).",
    ]
    for name, table in named:
        statement = f"CREATE TABLE {name} (*) FROM {source} TABLE {_text(table.external)};"
        if table.problem:
            lines += [_comment(f"{table.external} cannot be captured: {table.problem}"), _comment(statement)]
        else:
            lines.append(statement)
    return "\n".join([*lines, *_examples([x for x in named if not x[1].problem]), ""])


def _comment(text: str) -> str:
    """Names are the source's: a line's end in one must not end the comment."""
    return "\n".join(f"-- {line}" for line in text.splitlines())


def _examples(tables: Sequence[tuple[str, FoundTable]]) -> list[str]:
    """Of a table with a key, if there is one: what is written here works when its comment is taken away."""
    keyed = [(name, table.key) for name, table in tables if table.key]
    example, key = keyed[0] if keyed else (tables[0][0] if tables else "orders", ("id",))
    return [
        "",
        "-- A view is kept up to date with every checkpoint. Take the comment away and write your query (Spark SQL):",
        f"-- CREATE MATERIALIZED VIEW {_quoted('my_view')} AS SELECT count(*) AS n FROM {example};",
        "",
        "-- A sink delivers the changes of a table or view exactly once; docs/sinks.md has the connectors and options:",
        _comment(
            f"CREATE SINK my_sink FROM {example} "
            f"WITH (connector='files', path='./out', primary_key={_text(','.join(key))});"
        ),
    ]


def _our_name(external: str, taken: set[str]) -> str:
    """`orders` for public.orders, `schema_table` for others, `shop` for a database; a number behind what is taken."""
    plain = external.replace('"', "").removeprefix("public.").replace(".", "_")
    plain = "".join(c if c.isprintable() else "_" for c in plain)
    plain = plain or "t"
    name, number = plain, 1
    while name.lower() in {t.strip("`").lower() for t in taken}:
        number += 1
        name = f"{plain}_{number}"
    quoted = _quoted(name)
    taken.add(quoted)
    return quoted


def _quoted(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else "`" + name.replace("`", "``") + "`"


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
