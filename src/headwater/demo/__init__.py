"""`headwater demo`: a real Postgres under load, copied, joined, delivered, killed in the middle, and compared.

    shop (Postgres) ─► orders, customers ─► revenue (join, aggregate) ─► warehouse (a second database)

`shop.py` has the schema and the load, `process.py` the engine's process, `compare.py` the verdict, `screen.py` what is
shown. Everything lives in one temporary directory and is gone at the end, also after ctrl-C.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from headwater.demo.compare import VIEW_QUERY, Comparison, compare_all
from headwater.demo.process import EngineProcess
from headwater.demo.screen import Screen
from headwater.demo.shop import DATABASE, WAREHOUSE, Load, make_shop
from headwater.errors import DefiniteError, HeadwaterError
from headwater.testing.servers import PostgresServer

__all__ = ["run_demo"]

PASSWORD_VARIABLE: Final = "HEADWATER_DEMO_PASSWORD"
SPLITS: Final = 12
# The copy is slowed down until the crash, so that the crash finds it in the middle on any machine.
SLOW_COPY_S: Final = 40
KILL_AT_PERCENT: Final = 40.0
POLL_S: Final = 0.5
CATCH_UP_TIMEOUT_S: Final = 240.0
WIDTH: Final = 110  # of a printed figure; the comparison itself is of the whole

PIPELINE: Final = """\
-- What the demo runs: a source and two captured tables. The password is a reference, resolved where it is used.
CREATE SOURCE shop WITH (
    connector = 'postgres-cdc', hostname = '{host}', port = '{port}', username = '{user}', password = '${{{variable}}}',
    database.name = '{database}', slot.name = 'headwater', publication.name = 'headwater'
);
CREATE TABLE customers (*) FROM shop TABLE 'public.customers';
CREATE TABLE orders (*) FROM shop TABLE 'public.orders'
    WITH (backfill.parallelism = '2', backfill.num_rows_per_split = '{per_split}', backfill.rate_limit = '{rate}');
"""
VIEW: Final = f"CREATE MATERIALIZED VIEW revenue AS {VIEW_QUERY}"
NEWEST_EPOCH: Final = (
    "SELECT epoch, position FROM hw_catalog.hw_epochs WHERE position IS NOT NULL ORDER BY epoch DESC LIMIT 1"
)
SINK: Final = (
    "CREATE SINK revenue_out FROM revenue WITH (connector = 'postgres', hostname = '{host}', port = '{port}', "
    "username = '{user}', password = '${{{variable}}}', database.name = '{database}', table.name = 'revenue', "
    "primary_key = 'country')"
)


def run_demo(keep: bool, rows: int, seconds: int, data_dir: Path | None = None) -> int:
    """0 if everything is equal at the end, 1 if not. The engine's data is kept if it has a `data_dir` of its own."""
    directory = Path(tempfile.mkdtemp(prefix="headwater-demo-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.enter_context(_signals_interrupt())
        screen = stack.enter_context(Screen())
        return Demo(screen, stack, directory, data_dir or directory / "data", rows, seconds).run(keep)


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and a closed terminal end the demo as ctrl-C does: with everything stopped and removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Demo:
    """The acts, in order. What is started is pushed on the stack, and so ends in the opposite order."""

    def __init__(
        self, screen: Screen, stack: contextlib.ExitStack, directory: Path, data_dir: Path, rows: int, seconds: int
    ) -> None:
        self.screen = screen
        self.stack = stack
        self.directory = directory
        self.data_dir = data_dir
        self.rows = max(1000, rows)
        self.seconds = seconds
        self.server: PostgresServer
        self.load: Load
        self.engine: EngineProcess

    def run(self, keep: bool) -> int:
        self._open_shop()
        self._start_engine()
        self._copy_until_crash()
        self._finish_copy()
        self._live()
        good = self._verdict()
        if keep:
            self._wait_for_user()
        return 0 if good else 1

    # -- acts -------------------------------------------------------------------------------------------------------

    def _open_shop(self) -> None:
        self.screen.step("starting a private Postgres")
        self.server = self.stack.enter_context(PostgresServer("embedded"))
        make_shop(self.server, self.rows)
        self.load = Load(self.server, self.rows)
        self.stack.callback(self.load.stop)
        self.load.start()
        self.screen.step(f"shop open: {self.rows:,} orders, and customers who keep writing")

    def _start_engine(self) -> None:
        pipeline = self.directory / "pipeline.sql"
        pipeline.write_text(
            PIPELINE.format(
                **self._connection(DATABASE),
                per_split=max(1, self.rows // SPLITS),
                rate=max(1, self.rows // SLOW_COPY_S),
            )
        )
        environment = {PASSWORD_VARIABLE: self.server.password}
        self.engine = EngineProcess(pipeline, self.data_dir, self.directory / "engine.log", environment)
        self.stack.callback(self.engine.stop)
        self.screen.step("starting the engine: headwater run pipeline.sql")
        self.engine.start()
        self.screen.step("engine up; copying both tables in parallel while they are written to")

    def _connection(self, database: str) -> dict[str, Any]:
        server = self.server
        return {
            "host": server.host,
            "port": server.port,
            "user": server.user,
            "variable": PASSWORD_VARIABLE,
            "database": database,
        }

    def _copy_until_crash(self) -> None:
        """The view and the sink are made while the copy goes on; then the engine is killed."""
        creating = Background(self._create_view_and_sink)
        self._watch(lambda s: creating.done and _in_the_middle(s))
        creating.finish()
        status = self.engine.status()
        self.screen.still()
        state = f"{_copied(status)}; {self.load.transactions:,} transactions so far"
        pid = self.engine.kill()
        self.screen.step(f"kill -9 {pid} ({state})")
        self.engine.start()
        self.screen.step("engine up again; it goes on where the last checkpoint was")

    def _create_view_and_sink(self) -> None:
        deadline = time.monotonic() + CATCH_UP_TIMEOUT_S
        while {"orders", "customers"} - {j["name"] for j in self.engine.status()["jobs"]}:
            if time.monotonic() > deadline:
                raise DefiniteError("DEMO_TIMEOUT", "the tables were not created in time")
            time.sleep(POLL_S)
        self.screen.step(f"creating a view: {VIEW}")
        self.engine.run(VIEW)
        self.screen.step("creating a sink into a second database: CREATE SINK revenue_out FROM revenue …")
        self.engine.run(SINK.format(**self._connection(WAREHOUSE)))

    def _finish_copy(self) -> None:
        self.engine.run("ALTER TABLE orders SET BACKFILL_RATE_LIMIT = DEFAULT")
        self.screen.step("rate limit of the copy lifted")
        self._watch(lambda s: _all_live([j for j in s["jobs"] if j["kind"] == "table"]))
        self.screen.still()
        self.screen.step("both tables are copied, and followed from now on")

    def _live(self) -> None:
        until = time.monotonic() + self.seconds
        self.screen.step(f"following the changes for {self.seconds} s")
        self._watch(lambda _: time.monotonic() >= until)
        self.load.stop()
        if self.load.error is not None:
            raise DefiniteError("DEMO_LOAD_FAILED", "the load ended with an error", detail=str(self.load.error))
        self.screen.still()
        self.screen.step(f"load stopped after {self.load.transactions:,} transactions; catching up")

    def _verdict(self) -> bool:
        """Everything that is on its way has arrived: now it is equal or it is wrong."""
        began = time.monotonic()
        self._wait_until_delivered()
        found = compare_all(self.engine, self.server)
        self.screen.step(f"caught up and compared in {time.monotonic() - began:.1f} s")
        self._print(found)
        good = all(c.equal for c in found)
        self.screen.step("everything is equal" if good else "NOT EQUAL")
        return good

    def _wait_until_delivered(self) -> None:
        """Until a committed epoch holds the source's last transaction, and the sink's log is truncated to it (I5)."""
        with self.server.connect(DATABASE) as connection:
            row = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        end = _lsn(str(row[0]))
        holds: list[int] = []

        def delivered(status: dict[str, Any]) -> bool:
            if not _all_live(status["jobs"]) or any(_lsn(x["position"]) < end for x in status["sources"]):
                return False
            if not holds:
                newest = self.engine.run(NEWEST_EPOCH)[0]
                if _lsn(newest["position"]) < end:
                    return False
                holds.append(int(newest["epoch"]))
            return all(int(x["truncated_to"] or 0) >= holds[0] for x in status["log_stores"])

        self._watch(delivered)
        self.screen.still()

    def _print(self, found: list[Comparison]) -> None:
        for one in found:
            self.screen.line(f"  {'equal ' if one.equal else 'DIFFER'}  {one.what}")
            self.screen.line(f"          headwater  {_short(one.ours)}")
            if one.equal:
                continue
            self.screen.line(f"          expected   {_short(one.theirs)}")

    def _wait_for_user(self) -> None:
        self.load.start()
        self.screen.line()
        self.screen.line(f"page: {self.engine.page}")
        self.screen.line(f'try:  headwater sql --data-dir {self.engine.data_dir} -c "SELECT * FROM revenue"')
        self.screen.line("The load runs again. Ctrl-C stops and removes everything.")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(1)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _watch(self, done: Callable[[dict[str, Any]], bool]) -> None:
        """Show progress until something is so."""
        deadline = time.monotonic() + CATCH_UP_TIMEOUT_S + self.seconds
        while True:
            status = self.engine.status()
            self.screen.progress(status)
            if done(status):
                return
            failed = [j for j in status["jobs"] if j["state"] == "failed"]
            if failed or time.monotonic() > deadline:
                raise self._stuck(status, failed)
            time.sleep(POLL_S)

    def _stuck(self, status: dict[str, Any], failed: list[dict[str, Any]]) -> HeadwaterError:
        errors = "; ".join(f"{e['name']}: [{e['code']}] {e['message']}" for e in status["errors"][-3:])
        what = f"{failed[0]['kind']} {failed[0]['name']} has failed" if failed else "the demo did not get on in time"
        return DefiniteError("DEMO_STUCK", what, detail=errors, hint="run it again with --rows 50000")


class Background:
    """One piece of work beside the watching; its error is raised where it is waited for."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="demo", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def _all_live(jobs: list[dict[str, Any]]) -> bool:
    return all(j["state"] == "live" for j in jobs)


def _in_the_middle(status: dict[str, Any]) -> bool:
    """Some of the orders are handed over and some are not."""
    return any(j["name"] == "orders" and j["done"] and j["percent"] >= KILL_AT_PERCENT for j in status["jobs"])


def _copied(status: dict[str, Any]) -> str:
    orders = next(j for j in status["jobs"] if j["name"] == "orders")
    return f"orders: {orders['percent']:.1f}% read, {orders['done']} of {orders['total']} splits handed over"


def _lsn(text: str) -> int:
    from headwater.connectors.postgres.client import parse_lsn

    return parse_lsn(text)


def _short(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
