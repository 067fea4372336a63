"""The commands of `headwater`. Exit codes: 0 done, 1 failed, 2 wrong use or configuration."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from headwater import __version__
from headwater.cli.client import LocalSession, RemoteSession, Session, running_engine, session
from headwater.cli.input import read_text
from headwater.cli.live import Reporter, error_line, open_errors, status_table
from headwater.cli.options import DEFAULT_DIR, DataDir, SparkConf, spark_settings
from headwater.cli.output import print_result
from headwater.cli.setup import register
from headwater.cli.visible import PlainFormatter
from headwater.config import parse_parameter, suggestion
from headwater.errors import TransientError, UsageError
from headwater.model.schema import quoted
from headwater.server.endpoint import is_loopback, parse_address
from headwater.storage.location import data_directory

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Keeps tables, materialized views and sinks in step with live databases.",
)
POLL_S: Final = 0.5
CLEAR_TEXT: Final = (
    "--http {http} is open to the network, and tokens, statements and rows travel there in clear: put a proxy with TLS "
    "in front, or listen on 127.0.0.1 and come through a tunnel (ssh -L)"
)
WIDE: Final = 1000
ERRORS_SHOWN: Final = 5
FENCED_END_S: Final = 15.0  # a stop takes 10 s; it is noticed within 5 s, and all of it takes less than 30

Form = Annotated[str, typer.Option("--format", help="table, csv or json")]


class Options:
    debug = False
    log_json = False


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"headwater {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="logs as JSON lines on stderr")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="log what happens")] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    Options.debug, Options.log_json = debug, log_json
    configure_logging(json_lines=log_json, level=logging.INFO if verbose or log_json else logging.ERROR)


def configure_logging(*, json_lines: bool, level: int) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json_lines else PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("headwater").setLevel(level)
    for noisy in ("py4j", "uvicorn", "uvicorn.error", "httpx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            fields["error"] = record.exc_info[0].__name__
        return json.dumps(fields)


# -- the first five minutes: they stand first in the help -----------------------------------------------------------


@app.command()
def demo(
    keep: Annotated[bool, typer.Option("--keep", help="leave everything running to look at")] = False,
    rows: Annotated[int, typer.Option("--rows", help="orders in the shop at the start")] = 300_000,
    seconds: Annotated[int, typer.Option("--seconds", help="how long the load runs after the backfill")] = 15,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            help="keep the engine's data here; else it is gone at the end",
            parser=data_directory,
            metavar="PATH",
        ),
    ] = None,
) -> None:
    """A real Postgres under load, a backfill, a view, a sink, a crash, and a comparison. Exit code 0: all is equal.

    Example: headwater demo --keep
    """
    from headwater.demo import run_demo

    if data_dir is not None and data_dir.exists():
        raise UsageError("OPTION_VALUE", f"{data_dir} exists already", hint="the demo begins with a new data directory")
    raise typer.Exit(run_demo(keep=keep, rows=rows, seconds=seconds, data_dir=data_dir))


register(app)


# -- run ------------------------------------------------------------------------------------------------------------


@app.command()
def run(
    file: Annotated[Path | None, typer.Argument(help="statements to apply; what is there is left alone")] = None,
    data_dir: DataDir = DEFAULT_DIR,
    master: Annotated[str | None, typer.Option("--master", help="local[*], spark://host:port, yarn, k8s://…")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="system parameter name=value")] = None,
    http: Annotated[str, typer.Option("--http", help="HOST:PORT of the endpoint")] = "127.0.0.1:0",
    meta: Annotated[
        str | None, typer.Option("--meta-store", envvar="HEADWATER_META_STORE", help="URL of a shared meta store")
    ] = None,
    spark_conf: SparkConf = None,
    until_caught_up: Annotated[bool, typer.Option("--until-caught-up", help="end when nothing is left to do")] = False,
    allow_python: Annotated[
        bool, typer.Option("--allow-python", help="take code (CREATE FUNCTION, connector='python') over the endpoint")
    ] = False,
) -> None:
    """Run an engine: apply a file, show progress, go on until ctrl-C.

    Example: headwater run pipeline.sql --set barrier_interval_ms=500
    """
    from headwater.cli.statements import apply_file, check_text, note

    text = read_text(file) if file is not None else ""
    check_text(text)  # a wrong file is refused before anything starts
    settings = _settings(setting or [])
    parse_address(http)
    from headwater.api import Engine

    engine = Engine(
        data_dir,
        master=master,
        settings=settings,
        meta_url=meta,
        http=http,
        spark_conf=spark_settings(spark_conf),
        allow_python=allow_python,
    )
    caught_up = False
    try:
        with _stop_on_signals() as stopping, engine:
            _end_when_fenced(engine)
            if not is_loopback(parse_address(http)[0]):
                _warn(CLEAR_TEXT.format(http=http))
            if Options.log_json:  # which others may keep: without the token that is in the page's address
                logging.getLogger("headwater").info("headwater runs on %s, %s", data_dir, engine.core.endpoint.url)
            else:
                sys.stderr.write(f"headwater runs on {data_dir}; page: {engine.core.endpoint.page}\n")
                sys.stderr.flush()
            if waiting := engine.core.waiting_for:
                sys.stderr.write(f"waiting: {waiting}\n")
                sys.stderr.flush()
            apply_file(engine, text, logging.getLogger("headwater").info if Options.log_json else note)
            caught_up = _watch(engine, stopping, until_caught_up)
            stopping.set()  # a signal from now on finds the stop under way
            if engine.fatal is not None:
                raise engine.fatal
    except _Stopped:
        pass
    code = 1 if until_caught_up and not caught_up else 0
    if not engine.stopped:  # a thread that cannot be stopped in time must not hold the process
        sys.stdout.flush()
        os._exit(code)
    raise typer.Exit(code)


def _warn(text: str) -> None:
    if Options.log_json:
        logging.getLogger("headwater").warning("%s", text)
    else:
        sys.stderr.write(f"warning: {text}\n")
        sys.stderr.flush()


def _settings(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError("OPTION_VALUE", f"--set {pair}: write name=value", hint="--set barrier_interval_ms=500")
        parse_parameter(name.strip(), value.strip())  # a wrong one is refused before anything is made
        found[name.strip()] = value.strip()
    return found


class _Stopped(Exception):
    """SIGTERM, SIGHUP or ctrl-C, wherever the main thread was: starting, applying a file, or watching."""


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """The first signal stops in order; later ones change nothing, for a stop has its own time limit."""
    stopping = threading.Event()
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def handler(number: int, _frame: Any) -> None:
        if number == signal.SIGHUP:
            _forget(terminals)
        if not stopping.is_set():
            stopping.set()
            raise _Stopped

    # Whoever starts us by `nohup` has SIGHUP ignored, and means it.
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT, *hangup)}
    try:
        yield stopping
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _end_when_fenced(engine: Any) -> None:
    """An engine that was replaced ends, also if something of it hangs for ever: its successor needs what it holds."""

    def watch() -> None:
        while (error := engine.core.owner.fenced) is None:
            time.sleep(POLL_S)
        time.sleep(FENCED_END_S)
        with suppress(OSError):
            os.write(2, f"{error.render()}\n".encode())
        os._exit(1)

    threading.Thread(target=watch, name="fenced", daemon=True).start()


def _forget(terminals: list[int]) -> None:
    """The terminal is gone: what is still said goes nowhere, and is no error."""
    for descriptor in terminals:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _watch(engine: Any, stopping: threading.Event, until_caught_up: bool) -> bool:
    # What is there now stays as long as this process: the collector, which runs often (`spark/release.py`), need not
    # look at it again and again.
    gc.collect()
    gc.freeze()
    with Reporter(as_log=Options.log_json) as reporter:
        while not stopping.wait(POLL_S):
            if engine.fatal is not None:
                return False
            try:
                status = engine.status()
            except TransientError:  # the meta store is away for a moment: the engine waits for it, and so do we
                continue
            reporter.show(status)
            if until_caught_up and engine.caught_up():
                return True
            if until_caught_up and engine.given_up():
                return False
    return False


# -- sql ------------------------------------------------------------------------------------------------------------


@app.command()
def sql(
    file: Annotated[Path | None, typer.Argument(help="a file of statements; - or nothing reads stdin")] = None,
    command: Annotated[str | None, typer.Option("-c", "--command", help="statements to run")] = None,
    form: Form = "table",
    data_dir: DataDir = DEFAULT_DIR,
    spark_conf: SparkConf = None,
) -> None:
    """Run statements on the engine of a data directory, or on one that lives for this command.

    Example: headwater sql -c "SELECT * FROM orders LIMIT 5" --format json
    """
    from headwater.cli.statements import run_statements

    if form not in ("table", "csv", "json"):
        raise UsageError("OPTION_VALUE", f"--format {form} is not known", hint="table, csv or json")
    if command is not None and file is not None:
        raise UsageError("OPTION_VALUE", "give a file or -c, not both")
    if command is None:
        command = read_text(None if file is None or str(file) == "-" else file)
    with session(data_dir, text=command, make=True, spark_conf=spark_conf) as engine:
        run_statements(engine, command, form)


# -- status and control ---------------------------------------------------------------------------------------------


@app.command()
def status(
    data_dir: DataDir = DEFAULT_DIR,
    watch: Annotated[bool, typer.Option("--watch", help="show it again and again")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON on stdout")] = False,
) -> None:
    """How everything stands: jobs, progress, lag, backlogs, errors.

    Example: headwater status --watch
    """
    from rich.console import Console

    if watch:
        with suppress(_Stopped), _stop_on_signals(), Reporter() as reporter:
            while True:
                reporter.show(_status(data_dir))
                time.sleep(1.0)
        return
    found = _status(data_dir)
    if as_json:
        sys.stdout.write(json.dumps(found, ensure_ascii=False, default=str) + "\n")
        return
    # Piped somewhere, a line is as long as it is.
    Console(width=None if sys.stdout.isatty() else WIDE).print(status_table(found))
    for error in open_errors(found)[-ERRORS_SHOWN:]:
        sys.stderr.write(error_line(error) + "\n")


def _status(data_dir: Path) -> dict[str, Any]:
    from headwater.cli.offline import offline_status

    endpoint = running_engine(data_dir)
    return RemoteSession(endpoint).status() if endpoint is not None else offline_status(data_dir)


@app.command()
def token(
    read: Annotated[bool, typer.Option("--read", help="the one that may only look, for Prometheus")] = False,
    data_dir: DataDir = DEFAULT_DIR,
) -> None:
    """Print the token of the running engine: for `Authorization: Bearer …`. Each engine makes new ones when it starts.

    Example: headwater token --read
    """
    endpoint = running_engine(data_dir)
    if endpoint is None:
        raise UsageError("NO_ENGINE", "no engine runs on this data directory", hint="headwater run, or --data-dir")
    sys.stdout.write((endpoint.read_token if read else endpoint.token) + "\n")


@app.command()
def pause(data_dir: DataDir = DEFAULT_DIR) -> None:
    """Stop backfill reads, view refresh and delivery; capture and checkpoints go on.

    Example: headwater pause --data-dir /srv/headwater
    """
    with session(data_dir) as engine:
        engine.run("PAUSE")


@app.command()
def resume(data_dir: DataDir = DEFAULT_DIR) -> None:
    """Go on after `pause`.

    Example: headwater resume --data-dir /srv/headwater
    """
    with session(data_dir) as engine:
        engine.run("RESUME")


@app.command()
def drop(
    name: Annotated[str, typer.Argument(help="a source, table, view or sink")],
    cascade: Annotated[bool, typer.Option("--cascade", help="and everything that uses it")] = False,
    data_dir: DataDir = DEFAULT_DIR,
) -> None:
    """Drop a source, table, view or sink.

    Example: headwater drop orders --cascade
    """
    with session(data_dir) as engine:
        found = engine.run("SELECT name, kind FROM hw_catalog.hw_jobs") or {"rows": []}
        kinds = {r["name"].lower(): r["kind"] for r in found["rows"]}
        if name.lower() not in kinds:
            raise UsageError("UNKNOWN_JOB", f"there is no source, table, view or sink {name}", hint="headwater status")
        kind = {"view": "MATERIALIZED VIEW"}.get(kinds[name.lower()], kinds[name.lower()].upper())
        engine.run(f"DROP {kind} {quoted(name)}{' CASCADE' if cascade else ''}")


@app.command()
def resync(table: Annotated[str, typer.Argument(help="a captured table")], data_dir: DataDir = DEFAULT_DIR) -> None:
    """Copy a captured table again beside the old one, and apply the difference.

    Example: headwater resync orders
    """
    with session(data_dir) as engine:
        engine.run(f"RESYNC {quoted(table)}")
        if isinstance(engine, LocalSession):  # this engine is here for the copy; without it nothing would happen
            engine.run("WAIT")


@app.command()
def verify(
    table: Annotated[str, typer.Argument(help="a captured table")],
    repair: Annotated[bool, typer.Option("--repair", help="put the source's rows where they differ")] = False,
    form: Form = "table",
    data_dir: DataDir = DEFAULT_DIR,
) -> None:
    """Compare a captured table with its source: count and checksum per split, at one position. Exit code 1: it differs.

    Example: headwater verify orders --repair
    """
    with session(data_dir) as engine:
        result = engine.run(f"VERIFY {quoted(table)}{' REPAIR' * repair}") or {"columns": [], "rows": []}
        print_result(result, form)
        wrong = [r for r in result["rows"] if not r["equal"] and not r.get("repaired")]
        if wrong:
            sys.stderr.write(f"error: [VERIFY_DIFFERS] {len(wrong)} of {len(result['rows'])} splits differ\n")
            raise typer.Exit(1)


@app.command()
def rewind(
    sink: Annotated[str, typer.Argument(help="a sink")],
    to_epoch: Annotated[int, typer.Option("--to-epoch", help="deliver everything after this epoch again")],
    data_dir: DataDir = DEFAULT_DIR,
) -> None:
    """Deliver again from an earlier epoch that is still retained (hw_catalog.hw_epochs has them).

    Example: headwater rewind orders_out --to-epoch 11636563980517376
    """
    with session(data_dir) as engine:
        engine.run(f"REWIND {quoted(sink)} TO {to_epoch}")


@app.command("dead-letters")
def dead_letters(
    sink: Annotated[str | None, typer.Argument(help="only of this sink")] = None,
    replay: Annotated[bool, typer.Option("--replay", help="deliver them again, as their keys are now")] = False,
    form: Form = "table",
    data_dir: DataDir = DEFAULT_DIR,
) -> None:
    """Rows that targets refused: when, how many, why, and the file that holds them.

    Example: headwater dead-letters orders_out --replay
    """
    if replay and sink is None:
        raise UsageError("SQL_SYNTAX", "--replay takes the name of a sink", hint="headwater dead-letters SINK --replay")
    with session(data_dir, text="" if replay else "SHOW DEAD LETTERS") as engine:
        if sink is not None:
            _check_sink(engine, sink)
        if replay and sink is not None:
            engine.run(f"REPLAY {quoted(sink)}")
        result = engine.run("SHOW DEAD LETTERS") or {"columns": [], "rows": []}
        rows = [r for r in result["rows"] if sink is None or r["sink"].lower() == sink.lower()]
        print_result({"columns": result["columns"], "rows": rows}, form)


def _check_sink(engine: Session, name: str) -> None:
    found = engine.run("SHOW SINKS") or {"rows": []}
    names = [r["name"] for r in found["rows"]]
    if name.lower() not in [n.lower() for n in names]:
        raise UsageError("UNKNOWN_SINK", f"there is no sink {name}", hint=suggestion(name, names))
