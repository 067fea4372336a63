"""I2 on a real Postgres: at every committed epoch every table is the source as of that epoch's position.

Writers at full speed while tables backfill, the engine killed with kill -9 and started again, its connections cut, the
server restarted. What is expected comes from a witness with a slot and a decoder of its own (`cdc_reference.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import headwater
from cdc_load import FILL, SCHEMA, TABLES, Chaos, Writers
from cdc_reference import ReferenceReplica, parse_lsn
from headwater.testing.servers import PostgresServer, TcpProxy
from postgres_versions import OTHERS, USUAL, odd_collation

pytestmark = [pytest.mark.postgres, pytest.mark.spark]
KEYS = {"acc": ("id",), "comp": ("a", "b"), "nat": ("name",), "ledger": ("id",), "series": ("id",)}
SETTINGS = {"barrier_interval_ms": "500"}
SOURCE = """
CREATE SOURCE shop WITH (connector='postgres-cdc', hostname='{host}', port='{port}', username='{user}',
    password='${{file:{password}}}', database.name='{database}', slot.name='headwater');
"""
TABLE = """
CREATE TABLE {table} (*) FROM shop TABLE 'public.{table}' WITH (backfill.num_rows_per_split='{split}',
    backfill.parallelism='2'{limit});
"""


@dataclass(frozen=True)
class Plan:
    """How much of everything. `trouble_s`: seconds between two faults; None for no faults but kills of the engine."""

    rows: int
    kills: int
    samples: int
    trouble_s: tuple[float, float] | None = None


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    version = getattr(request, "param", USUAL)
    if not PostgresServer.available(version):
        pytest.skip(f"no binaries of Postgres {version} on this machine")
    with PostgresServer(version) as server:
        yield server


def seed_of(round_: int = 0) -> int:
    return int(os.environ.get("HW_TEST_SEED", random.randrange(1 << 30))) + round_


def test_every_epoch_is_the_source_at_its_position_while_the_engine_is_killed(
    source: PostgresServer, tmp_path: Path
) -> None:
    kills = int(os.environ.get("HW_TEST_KILLS", 2))
    run(source, tmp_path, seed_of(), Plan(rows=2000, kills=kills, samples=6, trouble_s=(3, 8)))


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(int(os.environ.get("HW_TEST_ROUNDS", 4))))
def test_every_epoch_is_the_source_at_its_position_for_long(
    source: PostgresServer, tmp_path: Path, round_: int
) -> None:
    run(source, tmp_path, seed_of(round_), Plan(rows=20_000, kills=5, samples=40, trouble_s=(2, 10)))


@pytest.mark.slow
@pytest.mark.parametrize("source", [*OTHERS, "embedded"], indirect=True)
def test_every_epoch_is_the_source_at_its_position_on_other_versions(source: PostgresServer, tmp_path: Path) -> None:
    run(source, tmp_path, seed_of(), Plan(rows=6_000, kills=3, samples=20, trouble_s=(3, 8)))


def run(source: PostgresServer, folder: Path, seed: int, plan: Plan) -> None:
    print(f"seed {seed} (HW_TEST_SEED={seed} repeats the load)")
    rng = random.Random(seed)
    with source.connect() as connection:
        connection.execute(SCHEMA.replace("{collation}", odd_collation(connection)).encode())
        witness = ReferenceReplica(source.connect, TABLES, frozenset({"big"}))
        witness.watch()
        connection.execute(FILL.format(n=plan.rows).encode())
    data = folder / "data"
    restarts: list[float] = []
    with TcpProxy(source.port) as proxy, Writers(source.connect, seed, plan.rows) as writers:
        pipeline = folder / "pipeline.sql"
        # By a file: in one process there is one JVM for all cases, whose workers have the environment of the first.
        password = folder / "password"
        password.write_text(source.password)
        pipeline.write_text(statements(source, proxy, plan, password))
        with trouble(source, proxy, seed, plan) as chaos:
            for number in range(plan.kills):
                run_and_kill(pipeline, data, rng.uniform(0.5, 5), "PLANNED" if number == 0 else "HANDED_OVER")
                restarts.append(time.time())
            with headwater.Engine(data, master="local[3]", settings=SETTINGS) as engine:
                finish_under_load(engine, source, chaos, writers)
                witness.collect()
                check(engine, witness, rng, restarts, plan.samples)


def statements(source: PostgresServer, proxy: TcpProxy, plan: Plan, password: Path) -> str:
    text = SOURCE.format(
        host=proxy.host, port=proxy.port, user=source.user, database=source.database, password=password
    )
    for table in TABLES:
        split = max(5000, plan.rows // 4) if table == "comp" else plan.rows // 4  # bulk inserts make it much larger
        # Without a limit `series` is read page by page, by two readers that take from the same splits.
        limit = "" if table == "series" else f", backfill.rate_limit='{plan.rows // 6}'"
        text += TABLE.format(table=table, split=split, limit=limit)
    return text


def trouble(
    source: PostgresServer, proxy: TcpProxy, seed: int, plan: Plan
) -> contextlib.AbstractContextManager[Chaos | None]:
    if plan.trouble_s is None:
        return contextlib.nullcontext()
    return Chaos(source, proxy, seed, plan.trouble_s)


def finish_under_load(engine: Any, source: PostgresServer, chaos: Chaos | None, writers: Writers) -> None:
    """Until every table is live and has all that was written."""
    for table in TABLES:
        engine.execute(f"ALTER TABLE {table} SET BACKFILL_RATE_LIMIT = 1000000")
    wait_until(lambda: all(j["state"] == "live" for j in engine.status()["jobs"]), 480, engine)
    time.sleep(3)
    if chaos is not None:
        chaos.stop()
        print(f"trouble: {', '.join(chaos.done)}")
    time.sleep(2)
    writers.stop()
    print(f"{writers.committed} transactions, {writers.lost} connections lost")
    with source.connect() as connection:
        end = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert end is not None
    wait_until(lambda: parse_lsn(engine.status()["sources"][0]["position"]) >= parse_lsn(end[0]), 90, engine)


def run_and_kill(pipeline: Path, data: Path, after_s: float, state: str) -> None:
    """An engine of its own process, killed some seconds after its tables are planned, or the first split is shown."""
    arguments = ["run", str(pipeline), "--data-dir", str(data), "--master", "local[3]", "--set"]
    (data / "endpoint.json").unlink(missing_ok=True)
    process = start_engine([*arguments, "barrier_interval_ms=500"], data)
    try:
        deadline = time.monotonic() + 200
        while not reached(data, state) and time.monotonic() < deadline:
            if process.poll() is not None:
                # Creating is definite: a source that is down just then ends the run, and the user starts it again.
                text = (data.parent / "stderr.txt").read_text()
                assert any(code in text for code in ("SOURCE_UNREACHABLE", "SOURCE_")), text[-3000:]
                process = start_engine([*arguments, "barrier_interval_ms=500"], data)
            time.sleep(0.2)
        time.sleep(after_s)
    finally:
        kill(process)


def start_engine(arguments: list[str], data: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "headwater.cli", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=(data.parent / "stderr.txt").open("ab"),
        start_new_session=True,
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    helpers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    # The JVM and the reader see that their pipes are closed and end by themselves.
    _, left = psutil.wait_procs(helpers, timeout=20)
    for helper in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            helper.kill()


def reached(data: Path, state: str) -> bool:
    """The engine is up, all tables are planned, and, if that is what is waited for, some split is handed over."""
    import sqlite3

    if not (data / "endpoint.json").exists():
        return False
    pid = json.loads((data / "endpoint.json").read_text())["pid"]
    if not psutil.pid_exists(pid):
        return False
    with contextlib.closing(sqlite3.connect(data / "meta.db")) as db:
        found = db.execute("SELECT table_id, state FROM splits").fetchall()
    return len({table for table, _ in found}) == len(TABLES) and (state == "PLANNED" or state in {s for _, s in found})


def wait_until(condition: Any, seconds: float, engine: Any) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert engine.fatal is None, engine.fatal
        assert time.monotonic() < deadline, state_of(engine)
        time.sleep(0.3)


def state_of(engine: Any) -> str:
    status = engine.status()
    jobs = [(j["name"], j["state"], j["phase"], j["done"], j["total"], j["waiting_for"]) for j in status["jobs"]]
    return json.dumps([jobs, status["sources"], status["errors"][-20:], status["barriers"][-5:]], default=str)


# -- comparing ------------------------------------------------------------------------------------------------------


def check(engine: Any, witness: ReferenceReplica, rng: random.Random, restarts: list[float], samples: int) -> None:
    epochs = engine.execute("SELECT epoch, position, committed_at FROM hw_catalog.hw_epochs WHERE position IS NOT NULL")
    rows = sorted(epochs[0].rows, key=lambda r: r["epoch"])
    splits = engine.execute("SELECT * FROM hw_catalog.hw_splits")[0].rows
    compared = 0
    for row in chosen(rows, splits, rng, restarts, samples):
        witness.advance(parse_lsn(row["position"]))
        for table in shown_at(splits, row["epoch"]):
            expected = in_range(table, witness.state[table].values(), splits, row["epoch"])
            found = rows_at(engine, table, row["epoch"])
            assert_equal(found, expected, f"{table} at epoch {row['epoch']}, position {row['position']}")
            compared += len(expected)
    assert witness.transactions > 50
    assert compared > 0
    print(f"{len(rows)} epochs, {witness.transactions} transactions replayed, {compared} rows compared")


def shown_at(splits: list[Any], epoch: int) -> list[str]:
    """The tables of which something was handed over."""
    return [
        t
        for t in TABLES
        if any(s["table_name"] == t and (s["handed_over_epoch"] or epoch + 1) <= epoch for s in splits)
    ]


def chosen(rows: list[Any], splits: list[Any], rng: random.Random, restarts: list[float], samples: int) -> list[Any]:
    """The first epoch of each hand-over, those around restarts, the last, and random ones; at most twice `samples`."""
    handed = sorted({s["handed_over_epoch"] for s in splits if s["handed_over_epoch"] is not None})
    by_epoch = {r["epoch"]: r for r in rows}
    picks = {e for e in rng.sample(handed, min(len(handed), samples // 2)) if e in by_epoch}
    for at in restarts:
        later = [r["epoch"] for r in rows if headwater_time(r) > at]
        earlier = [r["epoch"] for r in rows if headwater_time(r) <= at]
        picks |= {*later[:1], *earlier[-1:]}
    picks |= set(rng.sample(sorted(by_epoch), min(len(by_epoch), samples // 2))) | {rows[0]["epoch"], rows[-1]["epoch"]}
    return [by_epoch[e] for e in sorted(picks)]


def headwater_time(row: Any) -> float:
    import datetime as dt

    at = row["committed_at"]
    moment = at if isinstance(at, dt.datetime) else dt.datetime.fromisoformat(str(at).replace("Z", "+00:00"))
    return moment.replace(tzinfo=moment.tzinfo or dt.UTC).timestamp()


def rows_at(engine: Any, table: str, epoch: int) -> list[tuple[str | None, ...]]:
    frame = engine.table(table).df(epoch)
    columns = [f"md5({n})" if n == "big" else f"cast({n} AS string)" for n in frame.columns]
    found = frame.selectExpr(*columns).toArrow()
    return sorted(zip(*(c.to_pylist() for c in found.columns), strict=True), key=sortable)


def in_range(table: str, rows: Any, splits: list[Any], epoch: int) -> list[tuple[str | None, ...]]:
    """The rows whose key is in a range that was handed over at or before the epoch."""
    own = [s for s in splits if s["table_name"] == table]
    handed = [s for s in own if s["handed_over_epoch"] is not None and s["handed_over_epoch"] <= epoch]
    if table == "nat":  # physical ranges: all or nothing
        return sorted((tuple(r.values()) for r in rows), key=sortable) if handed else []
    ranges = [(bound(table, s["left"]), bound(table, s["right"])) for s in handed]
    found = []
    for row in rows:
        key = comparable(table, [row[k] for k in KEYS[table]])
        if any((low is None or low <= key) and (high is None or key < high) for low, high in ranges):
            found.append(tuple(row.values()))
    return sorted(found, key=sortable)


def bound(table: str, text: str | None) -> Any:
    return None if text is None else comparable(table, json.loads(text))


def comparable(table: str, key: list[str]) -> Any:
    match table:
        case "acc" | "series":
            return (int(key[0]),)
        case "comp":
            return (key[0].encode(), int(key[1]))
        case _:
            return (key[0].encode(),)


def sortable(row: tuple[str | None, ...]) -> tuple[str, ...]:
    return tuple("\0" if v is None else v for v in row)


def assert_equal(found: list[Any], expected: list[Any], what: str) -> None:
    missing, extra = set(expected) - set(found), set(found) - set(expected)
    assert len(found) == len(set(found)), f"{what}: rows twice"
    assert not missing and not extra, (
        f"{what}: {len(missing)} rows missing, {len(extra)} too many of {len(expected)}; "
        f"missing {sorted(missing, key=sortable)[:5]}, too many {sorted(extra, key=sortable)[:5]}"
    )
