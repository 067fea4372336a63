"""A source over TLS and what is done to captured tables while they run: real servers, one engine for each."""

from __future__ import annotations

import asyncio
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pytest

from cdc_world import World, lsn, open_world
from engine_process import headwater
from headwater.connectors.postgres import replication, slots
from headwater.connectors.postgres.check import check_source
from headwater.connectors.postgres.client import PostgresConfig
from headwater.errors import HeadwaterError, UsageError
from headwater.runtime import epoch_size
from headwater.runtime.dataflow import Dataflow
from headwater.sql.parser import parse
from headwater.sql.statements import CreateSource
from headwater.testing.servers import PostgresServer, TcpProxy

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("operations")
    certificate = folder / "ca.crt"

    def prepare(server: PostgresServer) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl")
        shutil.copy(server.offer_tls(), certificate)

    options = f", ssl.mode='verify-full', ssl.root.cert='{certificate}'"
    with open_world(folder / "data", options=options, prepare=prepare) as found:
        yield found


def encrypted(world: World) -> dict[str, bool]:
    """By name of the application: whether its connections use TLS."""
    rows = world.db.execute(
        "SELECT application_name, bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) "
        "WHERE application_name LIKE 'headwater%' GROUP BY 1"
    ).fetchall()
    return {str(name): bool(ssl) for name, ssl in rows}


def source_options(world: World, folder: Path, **more: str) -> str:
    server = world.server
    options = {
        "connector": "postgres-cdc",
        "hostname": server.host,
        "port": str(server.port),
        "username": server.user,
        "password": "${HW_TEST_PASSWORD}",
        "database.name": server.database,
        **{k.replace("_", "."): v for k, v in more.items()},
    }
    return ", ".join(f"{k}='{v}'" for k, v in options.items())


def as_role(role: str, folder: Path) -> dict[str, str]:
    """The options of a role whose password is its name; in a file, since Spark's workers have the environment of their
    start."""
    secret = folder / f"{role}.secret"
    secret.write_text(role)
    return {"username": role, "password": f"${{file:{secret}}}"}


def test_copy_and_stream_are_encrypted_and_the_server_is_verified(world: World, tmp_path: Path) -> None:
    world.sql(
        "CREATE TABLE sec (id int PRIMARY KEY, v text); INSERT INTO sec SELECT i, 'v' FROM generate_series(1, 500) i"
    )
    world.capture("public.sec", "sec", "backfill.rate_limit='200'")
    seen: dict[str, bool] = {}

    def copied() -> bool:
        seen.update(encrypted(world))
        return world.state("sec") == "live"

    world.until(copied)
    world.sql("UPDATE sec SET v = 'w' WHERE id < 10")
    world.assert_equal("sec", "sec")
    seen.update(encrypted(world))
    assert {"headwater backfill", "headwater headwater"} <= set(seen)
    assert all(seen.values()), seen
    other = tmp_path / "other.crt"
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=other", "-days", "2",
            "-keyout", tmp_path / "key", "-out", other)  # fmt: skip
    for mode in ("verify-ca", "verify-full"):
        options = source_options(world, tmp_path, ssl_mode=mode, ssl_root_cert=str(other), slot_name="tls")
        with pytest.raises(UsageError) as caught:
            world.engine.execute(f"CREATE SOURCE badly WITH ({options})")
        assert caught.value.code == "SOURCE_TLS"


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def test_source_logs_in_with_a_client_certificate_by_every_connection(world: World, tmp_path: Path) -> None:
    data, client = world.server.data, tmp_path / "client"
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=certified",
            "-keyout", client.with_suffix(".key"), "-out", client.with_suffix(".csr"))  # fmt: skip
    openssl("x509", "-req", "-in", client.with_suffix(".csr"), "-CA", data / "server.crt", "-CAkey",
            data / "server.key", "-set_serial", "7", "-days", "2", "-out", client.with_suffix(".crt"))  # fmt: skip
    client.with_suffix(".key").chmod(0o600)
    root = tmp_path / "root.crt"
    shutil.copy(data / "server.crt", root)
    rules = data / "pg_hba.conf"
    before = rules.read_text()
    world.sql("CREATE ROLE certified LOGIN SUPERUSER; CREATE TABLE by_cert (id int PRIMARY KEY)")
    world.sql("INSERT INTO by_cert SELECT generate_series(1, 20)")
    world.sql("ALTER SYSTEM SET ssl_ca_file = 'server.crt'")
    given = {"username": "certified", "password": "", "ssl_mode": "verify-full", "ssl_root_cert": str(root)}
    names = {"slot_name": "certified", "publication_name": "certified"}
    pair = {"ssl_cert": str(client.with_suffix(".crt")), "ssl_key": str(client.with_suffix(".key"))}
    try:
        rules.write_text("hostssl all certified 127.0.0.1/32 cert\n" + before)
        world.sql("SELECT pg_reload_conf()")
        with pytest.raises(UsageError) as caught:
            world.engine.execute(f"CREATE SOURCE certified WITH ({source_options(world, tmp_path, **given, **names)})")
        assert caught.value.code in ("SOURCE_TLS", "SOURCE_AUTH_FAILED")
        options = source_options(world, tmp_path, **given, **names, **pair)
        assert all(f.ok for f in check_source(config_of(options), ["public.by_cert"]))
        world.engine.execute(f"CREATE SOURCE certified WITH ({options})")
        world.engine.execute("CREATE TABLE by_cert (*) FROM certified TABLE 'public.by_cert'")
        world.live("by_cert")
        world.sql("DELETE FROM by_cert WHERE id > 10")
        world.until(lambda: world.rows("by_cert") == world.source_rows("by_cert"))
        users = world.db.execute(
            "SELECT DISTINCT application_name FROM pg_stat_activity JOIN pg_stat_ssl USING (pid) "
            "WHERE usename = 'certified' AND ssl AND client_dn = '/CN=certified'"
        ).fetchall()
        assert "headwater certified" in {name for (name,) in users}
    finally:
        world.engine.execute("DROP SOURCE IF EXISTS certified CASCADE")
        rules.write_text(before)
        world.sql("ALTER SYSTEM RESET ssl_ca_file")
        world.sql("SELECT pg_reload_conf()")


def config_of(options: str) -> PostgresConfig:
    (statement,) = parse(f"CREATE SOURCE x WITH ({options})")
    assert isinstance(statement, CreateSource)
    return PostgresConfig.from_options(statement.options)


def test_slot_that_somebody_is_using_is_refused_with_who_it_is(world: World, tmp_path: Path) -> None:
    world.sql("SELECT pg_create_logical_replication_slot('busy', 'pgoutput'); CREATE PUBLICATION busy")
    options = source_options(world, tmp_path, slot_name="busy", publication_name="busy")
    conninfo = config_of(options).conninfo()
    conn = replication.open_connection(conninfo, "somebody else")
    try:
        replication.start_streaming(conn, "busy", "busy", 0)
        with mock.patch.object(slots, "FREE_WAIT_S", 0.5), pytest.raises(UsageError) as caught:
            world.engine.execute(f"CREATE SOURCE busy WITH ({options})")
        said = (
            f"replication slot busy is in use by process {conn.backend_pid} (user postgres, application somebody else"
        )
        assert caught.value.code == "SOURCE_SLOT_IN_USE" and caught.value.message.startswith(said)
        wrong = [f.what for f in check_source(config_of(options)) if not f.ok]
        assert len(wrong) == 1 and wrong[0].startswith(said)
    finally:
        conn.finish()
    world.until(lambda: all(f.ok for f in check_source(config_of(options))), 60)
    world.engine.execute(f"CREATE SOURCE busy WITH ({options})")
    world.until(lambda: not all(f.ok for f in check_source(config_of(options))), 60)  # now we are the ones
    assert all(f.ok for f in check_source(config_of(options), exists=lambda: True))
    world.engine.execute("DROP SOURCE busy")
    free = "SELECT active IS FALSE FROM pg_replication_slots WHERE slot_name = 'busy'"
    world.until(lambda: world.db.execute(free).fetchone() == (True,), 60)
    world.sql("SELECT pg_drop_replication_slot('busy'); DROP PUBLICATION busy")  # made by somebody else, it stays


class Liar:
    """What a server says, with frames whose lengths are not true: those of `kind` that hold `mark`, while it `lies`."""

    def __init__(self) -> None:
        self.lies: Callable[[bytes], bytes] | None = None
        self.kind, self.mark = b"", b""
        self.told = 0

    def connection(self) -> Callable[[bytes], bytes]:
        held = bytearray()

        def altered(block: bytes) -> bytes:
            held.extend(block)
            said = bytearray()
            while len(held) >= 5 and len(held) > (length := int.from_bytes(held[1:5], "big")):
                frame = bytes(held[: length + 1])
                del held[: length + 1]
                if self.lies is not None and frame[:1] == self.kind and self.mark in frame:
                    self.told += 1
                    frame = self.lies(frame)
                said += frame
            return bytes(said)

        return altered


def with_length(length: int) -> Callable[[bytes], bytes]:
    return lambda frame: frame[:1] + struct.pack("!I", length) + frame[5:]


def field_longer(frame: bytes) -> bytes:
    """The last field's length is one more than there is."""
    at = frame.rindex(b"CANARY") - 4
    return frame[:at] + struct.pack("!i", int.from_bytes(frame[at : at + 4], "big") + 1) + frame[at + 4 :]


def cut_inside(frame: bytes) -> bytes:
    """A frame that is whole, around a message whose last value is cut off."""
    return frame[:1] + struct.pack("!I", len(frame) - 1 - 3) + frame[5:-3]


def test_server_whose_lengths_are_not_true_ends_in_an_error_and_nothing_is_lost_when_it_is_honest(
    world: World, tmp_path: Path
) -> None:
    world.sql("CREATE TABLE lied (id int PRIMARY KEY, v text); CREATE TABLE bag (v text)")
    world.sql("INSERT INTO lied SELECT i, 'CANARY' || i FROM generate_series(1, 300) i; ANALYZE lied")
    world.sql("INSERT INTO bag SELECT v FROM lied; ALTER TABLE bag REPLICA IDENTITY FULL")
    liar = Liar()
    with TcpProxy(world.server.port, world.server.host) as proxy:
        proxy.alter(liar.connection)
        names = {"slot_name": "liar", "publication_name": "liar"}
        at = {"hostname": proxy.host, "port": str(proxy.port), "ssl_mode": "disable"}
        world.engine.execute(f"CREATE SOURCE liar WITH ({source_options(world, tmp_path, **at, **names)})")

        def lying(
            name: str, kind: bytes, lie: Callable[[bytes], bytes], codes: set[str], mark: bytes, written: str = ""
        ) -> None:
            """Until an error of these is shown that was not there before; `written` is what to write meanwhile."""
            before, liar.told = len(found(name, codes)), 0
            liar.kind, liar.mark, liar.lies = kind, mark, lie
            if written:
                world.sql(f"INSERT INTO lied SELECT max(id) + 1, '{written}' FROM lied")
                world.sql(f"INSERT INTO bag VALUES ('{written}')")
            world.until(lambda: liar.told > 0 and len(found(name, codes)) > before, 120)

        def found(name: str, codes: set[str]) -> list[Any]:
            return [e for e in world.engine.status()["errors"] if e["name"] == name and e["code"] in codes]

        liar.kind, liar.mark, liar.lies = b"D", b"CANARY", with_length(2)
        world.engine.execute("CREATE TABLE lied (*) FROM liar TABLE 'public.lied'")
        for lie, code in (
            (with_length(0xFFFFFFFF), "SOURCE_PROTOCOL"),
            (with_length(2), "SOURCE_PROTOCOL"),
            (field_longer, "COPY_MALFORMED"),
        ):
            lying("lied", b"D", lie, {code}, b"CANARY")
        liar.kind, liar.lies = b"d", with_length(3)
        world.engine.execute("CREATE TABLE bag (*) FROM liar TABLE 'public.bag'")
        lying("bag", b"d", with_length(3), {"SOURCE_PROTOCOL"}, b"CANARY")
        world.live("lied")
        assert world.state("bag") == "creating"
        liar.lies = None
        world.live("bag")
        # The stream: libpq finds the frame's length wrong; a message that is cut off inside is found by a task.
        lost = {"SOURCE_UNREACHABLE", "SOURCE_PROTOCOL"}
        lying("liar", b"d", with_length(1), lost, b"STREAMED", written="STREAMED")
        liar.lies = None
        same(world, "lied", "bag")
        lying("liar", b"d", cut_inside, {"SPOOL_CORRUPT"}, b"CUT OFF", written="CUT OFF")
        liar.lies = None
        same(world, "lied", "bag")
        world.sql("UPDATE lied SET v = 'after' WHERE id > 290; DELETE FROM bag WHERE v LIKE '%1%'")
        same(world, "lied", "bag")
        world.live("lied", "bag")
        world.engine.execute("DROP SOURCE liar CASCADE")


def same(world: World, *names: str) -> None:
    for name in names:
        world.until(lambda n=name: world.rows(n) == world.source_rows(n), 120)  # type: ignore[misc]


def waits_for(world: World, name: str) -> str | None:
    found = world.engine.execute(f"SELECT waiting_for FROM hw_catalog.hw_progress WHERE name = '{name}'")[0]
    assert found is not None
    return found.rows[0]["waiting_for"]  # type: ignore[no-any-return]


def test_rate_limit_holds_inside_a_split_and_rate_and_parallelism_change_live(world: World) -> None:
    world.sql("CREATE TABLE slow (id int PRIMARY KEY, v text)")
    world.sql("INSERT INTO slow SELECT i, repeat('x', 500) FROM generate_series(1, 4000) i; ANALYZE slow")
    one = "backfill.num_rows_per_split='4000', backfill.parallelism='1'"
    world.capture("public.slow", "slow", f"backfill.rate_limit='10', {one}")
    world.until(lambda: bool(world.splits("slow")))
    assert len(world.splits("slow")) == 1
    time.sleep(4)
    # A page of 100 rows of it takes ten seconds: were the limit only between reads, it would be here by now.
    assert world.splits("slow")[0]["state"] == "PLANNED"
    world.sql("UPDATE slow SET v = 'y' WHERE id % 100 = 0")
    assert waits_for(world, "slow") is None
    world.engine.execute("ALTER TABLE slow SET BACKFILL_RATE_LIMIT = 0")
    assert waits_for(world, "slow") == "the rate limit is 0"  # although its read has begun
    world.engine.execute("PAUSE")
    assert waits_for(world, "slow") == "RESUME: the engine is paused"
    world.engine.execute("RESUME")
    assert waits_for(world, "slow") == "the rate limit is 0"
    world.engine.execute("ALTER TABLE slow SET PARALLELISM = 3")
    time.sleep(2)
    assert world.splits("slow")[0]["state"] == "PLANNED"
    world.engine.execute("ALTER TABLE slow SET BACKFILL_RATE_LIMIT = DEFAULT")
    assert waits_for(world, "slow") is None
    world.live("slow")
    world.assert_equal("slow", "slow")


def test_rows_of_a_slow_copy_are_seen_while_it_goes_on(world: World) -> None:
    world.sql("CREATE TABLE paced (id int PRIMARY KEY); INSERT INTO paced SELECT generate_series(1, 2000)")
    world.capture("public.paced", "paced", "backfill.rate_limit='100', backfill.parallelism='1'")
    world.until(lambda: len(world.splits("paced")) == 4)
    world.until(lambda: copied(world, "paced")["rows"] > 0)
    assert copied(world, "paced")["rows"] < 2000 and world.state("paced") == "creating"
    world.engine.execute("ALTER TABLE paced SET BACKFILL_RATE_LIMIT = DEFAULT")
    world.live("paced")
    world.assert_equal("paced", "paced")


def copied(world: World, name: str) -> dict[str, Any]:
    found = world.engine.execute(f"SELECT * FROM hw_catalog.hw_progress WHERE name = '{name}'")[0]
    assert found is not None
    return found.rows[0]


def test_rows_of_a_copy_go_on_to_be_seen_when_it_is_slowed_down_in_the_middle_of_a_split(world: World) -> None:
    world.sql("CREATE TABLE slowed (id int PRIMARY KEY, v int)")
    world.sql("INSERT INTO slowed SELECT i, i FROM generate_series(1, 6000) i")
    options = "backfill.parallelism='1', backfill.rate_limit='150', backfill.num_rows_per_split='3000'"
    world.capture("public.slowed", "slowed", options)
    world.until(lambda: len(world.splits("slowed")) == 2)  # read in pages of 750 rows, the first of which has begun
    world.engine.execute("ALTER TABLE slowed SET BACKFILL_RATE_LIMIT = 20")
    seen = [copied(world, "slowed")]
    while seen[-1]["rows"] < 200:
        before = seen[-1]["rows"]
        world.until(lambda before=before: copied(world, "slowed")["rows"] > before, 30)  # type: ignore[misc]
        seen.append(copied(world, "slowed"))
    assert [s["rows"] for s in seen] == sorted(s["rows"] for s in seen) and seen[1]["rows"] == 100
    # There are no statistics, and the number of splits grows.
    assert [s["percent"] for s in seen] == sorted(s["percent"] for s in seen)
    world.sql("UPDATE slowed SET v = -v WHERE id % 10 = 0; UPDATE slowed SET id = id + 10000 WHERE id % 1000 = 1")
    world.engine.execute("RECOVER")
    world.engine.execute("ALTER TABLE slowed SET BACKFILL_RATE_LIMIT = DEFAULT")
    world.live("slowed")
    world.assert_equal("slowed", "slowed")
    found = world.engine.execute("VERIFY slowed")[0]
    assert found is not None and all(row["equal"] for row in found.rows) and len(found.rows) >= 4


@pytest.mark.slow
def test_a_table_read_in_physical_ranges_is_slowed_down_too_and_its_rows_are_counted(world: World) -> None:
    world.sql("CREATE TABLE bare (a int, b text); ALTER TABLE bare REPLICA IDENTITY FULL")
    world.sql("INSERT INTO bare SELECT i, repeat('x', 400) FROM generate_series(1, 2000) i; ANALYZE bare")
    world.capture("public.bare", "bare", "backfill.rate_limit='100', backfill.parallelism='1'")
    world.until(lambda: 0 < copied(world, "bare")["rows"] < 2000, 30)
    world.sql("DELETE FROM bare WHERE a % 7 = 0; UPDATE bare SET b = 'y' WHERE a % 5 = 0")
    world.engine.execute("ALTER TABLE bare SET BACKFILL_RATE_LIMIT = DEFAULT")
    world.live("bare")
    world.assert_equal("bare", "bare")


def test_resume_waits_for_nothing_that_has_gathered_and_that_comes_in_epochs_of_bounded_size(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.sql("CREATE TABLE gathers (id int PRIMARY KEY, v int); INSERT INTO gathers VALUES (0, 0)")
    world.capture("public.gathers", "gathers")
    world.live("gathers")
    world.engine.execute("CREATE MATERIALIZED VIEW gathered AS SELECT v, count(*) AS n FROM gathers GROUP BY v")
    world.live("gathered")
    world.settle()
    may_work = threading.Event()
    run_tasks = Dataflow._run_tasks

    async def held_up(flow: Dataflow, tasks: list[Any]) -> Any:
        while tasks and not may_work.is_set():
            await asyncio.sleep(0.05)
        return await run_tasks(flow, tasks)

    monkeypatch.setattr(epoch_size, "SIZES", (10_000,) * 5)
    world.engine.execute("PAUSE")
    monkeypatch.setattr(Dataflow, "_run_tasks", held_up)
    begin = world.end()
    for i in range(20):
        world.sql(f"INSERT INTO gathers SELECT i, {i} FROM generate_series({1 + 100 * i}, {100 + 100 * i}) i")
    end = world.end()
    world.until(lambda: lsn(world.engine.status()["sources"][0]["acknowledged"]) >= end)
    statement = threading.Thread(target=world.engine.execute, args=("RESUME",), daemon=True)
    statement.start()
    statement.join(60)
    returned = not statement.is_alive()
    may_work.set()
    assert returned, "RESUME waited for the work of an epoch"
    world.assert_equal("gathers", "gathers")
    found = world.engine.execute("SELECT DISTINCT position FROM hw_catalog.hw_epochs WHERE position IS NOT NULL")[0]
    assert found is not None
    assert len([r for r in found.rows if begin < lsn(r["position"]) <= end]) >= 5
    assert sorted(row[1] for row in world.rows("gathered")) == [100] * 19 + [101]


def test_tables_are_added_dropped_and_resynced_while_others_run(world: World) -> None:
    world.sql(
        "CREATE TABLE stays (id int PRIMARY KEY, v int); INSERT INTO stays SELECT i, 0 FROM generate_series(1, 300) i"
    )
    world.sql(
        "CREATE TABLE comes (id int PRIMARY KEY, v int); INSERT INTO comes SELECT i, 0 FROM generate_series(1, 300) i"
    )
    world.capture("public.stays", "stays", "backfill.num_rows_per_split='50', backfill.rate_limit='100'")
    world.capture("public.comes", "goes", "backfill.rate_limit='10'")
    world.until(lambda: bool(world.splits("goes")))
    world.engine.execute("DROP TABLE goes")
    world.sql("UPDATE stays SET v = 1; UPDATE comes SET v = 1; INSERT INTO comes VALUES (1000, 2)")
    world.capture("public.comes", "comes")
    world.live("comes", "stays")
    world.assert_equal("comes", "comes")
    world.engine.execute("RESYNC stays")
    job = next(j["id"] for j in world.engine.status()["jobs"] if j["name"] == "stays")
    with pytest.raises(UsageError) as caught:  # it would be dropped, with its rows
        world.engine.execute(f"CANCEL JOBS {job}")
    assert caught.value.code == "NOT_CREATING"
    world.sql("DELETE FROM stays WHERE id < 100; INSERT INTO comes VALUES (1001, 3)")
    world.live("stays")
    world.assert_equal("stays", "stays")
    world.assert_equal("comes", "comes")


def published(db: psycopg.Connection, publication: str) -> set[str]:
    query = "SELECT tablename FROM pg_publication_tables WHERE pubname = %s"
    return {row[0] for row in db.execute(query, (publication,)).fetchall()}


def test_a_dropped_table_is_taken_out_of_the_publication_if_it_was_put_there_and_nobody_else_reads_it(
    world: World,
) -> None:
    for name in ("mine", "shared", "theirs"):
        world.sql(f"CREATE TABLE {name} (id int PRIMARY KEY); INSERT INTO {name} VALUES (1)")
    world.sql("ALTER PUBLICATION headwater ADD TABLE theirs")
    for name in ("mine", "shared", "theirs"):
        world.capture(f"public.{name}", name)
    world.capture("public.mine", "again")
    world.live("mine", "shared", "theirs", "again")
    world.engine.execute("DROP TABLE theirs; DROP TABLE mine")
    assert {"mine", "theirs"} <= published(
        world.db, "headwater"
    )  # one was there before us, the other is captured once more
    world.sql("INSERT INTO mine VALUES (2)")
    world.assert_equal("mine", "again")
    world.engine.execute("DROP TABLE again")
    assert {"mine", "shared", "theirs"} & published(world.db, "headwater") == {"shared", "theirs"}
    world.sql("SELECT pg_create_logical_replication_slot('another', 'pgoutput')")
    try:
        world.engine.execute("DROP TABLE shared")
        assert "shared" in published(world.db, "headwater")
    finally:
        world.sql("SELECT pg_drop_replication_slot('another')")


def test_a_dropped_source_leaves_a_publication_that_was_there_as_it_was(world: World, tmp_path: Path) -> None:
    world.server.create_database("elsewhere")
    options = {"database_name": "elsewhere", "slot_name": "older", "publication_name": "older"}
    with world.server.connect("elsewhere") as db:
        db.execute("CREATE TABLE first (id int PRIMARY KEY); CREATE TABLE second (id int PRIMARY KEY)")
        db.execute("CREATE PUBLICATION older FOR TABLE first")
        world.engine.execute(f"CREATE SOURCE elsewhere WITH ({source_options(world, tmp_path, **options)})")
        for name in ("first", "second"):
            world.engine.execute(f"CREATE TABLE {name} (*) FROM elsewhere TABLE 'public.{name}'")
        assert published(db, "older") == {"first", "second"}
        world.engine.execute("DROP SOURCE elsewhere CASCADE")
        assert published(db, "older") == {"first"}


def test_a_secret_that_is_missing_for_a_while_stops_no_copy_and_a_slot_that_is_left_behind_is_named(
    world: World, tmp_path: Path
) -> None:
    world.sql("CREATE ROLE forgetful LOGIN SUPERUSER PASSWORD 'forgetful'; CREATE TABLE kept (id int PRIMARY KEY)")
    world.sql("INSERT INTO kept SELECT generate_series(1, 50)")
    options = {"slot_name": "left_behind", "publication_name": "left behind", **as_role("forgetful", tmp_path)}
    secret = tmp_path / "forgetful.secret"
    world.engine.execute(f"CREATE SOURCE forgetful WITH ({source_options(world, tmp_path, **options)})")
    world.engine.execute("CREATE TABLE kept (*) FROM forgetful TABLE 'public.kept' WITH (backfill.rate_limit='0')")
    secret.unlink()
    world.engine.execute("ALTER TABLE kept SET BACKFILL_RATE_LIMIT = DEFAULT")

    def codes(name: str) -> dict[str, dict[str, Any]]:
        return {e["code"]: e for e in world.engine.status()["errors"] if e["name"] == name}

    world.until(lambda: "SECRET_MISSING" in codes("kept"), 60)
    assert world.state("kept") == "creating"
    secret.write_text("forgetful")
    world.until(lambda: world.state("kept") == "live", 60)
    secret.unlink()
    world.engine.execute("DROP SOURCE forgetful CASCADE")
    assert codes("forgetful")["SOURCE_NOT_RELEASED"]["hint"] == (
        "run on the source: SELECT pg_drop_replication_slot('left_behind'); DROP PUBLICATION \"left behind\";"
    )
    world.sql("SELECT pg_drop_replication_slot('left_behind'); DROP PUBLICATION \"left behind\"")


def test_what_needs_a_captured_or_a_running_table_is_refused_at_once(world: World) -> None:
    world.engine.execute("CREATE TABLE plain (id INT PRIMARY KEY)")
    with pytest.raises(UsageError) as caught:
        world.engine.execute("ALTER TABLE plain SET BACKFILL_RATE_LIMIT = 5")
    assert caught.value.code == "NOT_CAPTURED"
    world.sql("CREATE TABLE halted (id int PRIMARY KEY); INSERT INTO halted VALUES (1)")
    world.capture("public.halted", "halted")
    world.live("halted")
    world.engine.execute("PAUSE")
    try:
        with pytest.raises(UsageError) as caught:  # no epoch would reach the position of the comparison
            world.engine.execute("VERIFY halted")
    finally:
        world.engine.execute("RESUME")
    assert caught.value.code == "PAUSED"
    world.engine.execute("ALTER TABLE halted SET BACKFILL_RATE_LIMIT = 0")
    with pytest.raises(UsageError) as caught:
        world.engine.execute("VERIFY halted")
    assert caught.value.hint == "ALTER TABLE halted SET BACKFILL_RATE_LIMIT = DEFAULT"
    world.engine.execute(caught.value.hint)
    world.sql("DROP TABLE halted")
    world.until(lambda: world.state("halted") == "failed")
    with pytest.raises(UsageError) as caught:
        world.engine.execute("VERIFY halted REPAIR")
    assert caught.value.code == "VERIFY_FAILED"
    world.engine.execute("DROP TABLE halted")  # a failed job keeps the engine from having caught up


def test_partitions_are_captured_through_their_root(world: World) -> None:
    world.sql("CREATE TABLE part (id int, region text, v int, PRIMARY KEY (id, region)) PARTITION BY LIST (region)")
    world.sql("CREATE TABLE part_a PARTITION OF part FOR VALUES IN ('a')")
    world.sql("CREATE TABLE part_b PARTITION OF part FOR VALUES IN ('b') PARTITION BY RANGE (id)")
    world.sql("CREATE TABLE part_b1 PARTITION OF part_b FOR VALUES FROM (0) TO (1000000)")
    world.sql("INSERT INTO part SELECT i, CASE WHEN i % 2 = 0 THEN 'a' ELSE 'b' END, 0 FROM generate_series(1, 500) i")
    world.capture("public.part", "part", "backfill.num_rows_per_split='100'")
    world.live("part")
    world.sql("UPDATE part SET region = 'b' WHERE id = 2; UPDATE part SET v = 9 WHERE id < 10")
    world.sql("DELETE FROM part_a WHERE id > 490")
    world.sql("CREATE TABLE part_c PARTITION OF part FOR VALUES IN ('c'); INSERT INTO part VALUES (1, 'c', 5)")
    world.assert_equal("part", "part")


def test_check_looks_at_the_sources_and_tables_that_a_data_directory_has(world: World) -> None:
    world.sql("CREATE TABLE looked_at (id int PRIMARY KEY)")
    world.capture("public.looked_at", "seen_as")
    done = headwater("check", data_dir=Path(world.engine.core.data_dir.root.removeprefix("file://")))
    assert (done.returncode, "public.looked_at has primary key (id)" in done.stdout) == (0, True), done.stderr
    world.engine.execute("DROP TABLE seen_as")


def test_a_subset_of_the_columns_and_only_changes(world: World) -> None:
    world.sql("CREATE TABLE sub (id int PRIMARY KEY, a numeric(10,2), b text); INSERT INTO sub VALUES (1, 1.5, 'x')")
    with pytest.raises(UsageError) as caught:
        world.engine.execute("CREATE TABLE sub (id INT PRIMARY KEY, a DOUBLE) FROM shop TABLE 'public.sub'")
    assert (caught.value.code, "DECIMAL(10,2)" in caught.value.hint) == ("COLUMN_TYPE_DIFFERS", True)
    with pytest.raises(UsageError) as caught:
        world.engine.execute("CREATE TABLE sub (id INT PRIMARY KEY, b STRING NOT NULL) FROM shop TABLE 'public.sub'")
    assert (caught.value.code, "may be NULL" in caught.value.message) == ("COLUMN_TYPE_DIFFERS", True)
    with pytest.raises(UsageError) as caught:
        world.engine.execute("CREATE TABLE sub (a, b) FROM shop TABLE 'public.sub'")
    assert caught.value.code == "KEY_COLUMN_LEFT_OUT"
    world.engine.execute(
        "CREATE TABLE sub (b STRING, id INT NOT NULL PRIMARY KEY) FROM shop TABLE 'public.sub' WITH (snapshot='false')"
    )
    assert world.state("sub") == "live"
    world.sql("INSERT INTO sub VALUES (2, 2, 'y'), (3, 3, 'z'); DELETE FROM sub WHERE id < 3; UPDATE sub SET a = 0")
    world.settle()
    assert world.rows("sub") == [("z", 3)]


def test_what_cannot_be_captured_is_refused_before_anything_is_made(world: World, tmp_path: Path) -> None:
    world.sql('CREATE TABLE twins (id int PRIMARY KEY, "ID" int); CREATE TABLE lists (k int[] PRIMARY KEY)')
    world.sql("CREATE TABLE nothing (); ALTER TABLE nothing REPLICA IDENTITY FULL")
    world.sql("CREATE UNLOGGED TABLE loose (id int PRIMARY KEY)")
    world.sql("CREATE TABLE halved (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    world.sql("CREATE UNLOGGED TABLE halved_1 PARTITION OF halved FOR VALUES FROM (0) TO (9)")
    for table, code in (
        ("twins", "DUPLICATE_COLUMN"),
        ("lists", "KEY_TYPE"),
        ("nothing", "SOURCE_NOT_A_TABLE"),
        ("loose", "SOURCE_TABLE_NOT_LOGGED"),
        ("halved", "SOURCE_TABLE_NOT_LOGGED"),
        ("pg_catalog.pg_class", "SOURCE_NOT_A_TABLE"),
    ):
        with pytest.raises(UsageError) as caught:
            world.capture(table if "." in table else f"public.{table}", "refused")
        assert caught.value.code == code
    for options, why in (
        ("backfill.num_rows_per_split='0'", "takes a whole number from 1 on"),
        ("backfill.order='phsyical'", "physical"),
        ("backfill.order='physical', backfill.parallelism='0'", "single cursor"),
    ):
        with pytest.raises(UsageError, match="OPTION_VALUE") as caught:
            world.capture("public.lists", "refused", options)
        assert why in f"{caught.value.message} {caught.value.hint}"
    with pytest.raises(UsageError) as caught:
        world.engine.execute(f"CREATE SOURCE again WITH ({source_options(world, tmp_path, slot_name='headwater')})")
    assert (caught.value.code, "shop" in caught.value.message) == ("SOURCE_SLOT_FOREIGN", True)
    world.sql("SELECT pg_create_logical_replication_slot('other', 'test_decoding')")
    options = source_options(world, tmp_path, slot_name="other", publication_name="left over")
    with pytest.raises(UsageError) as caught:
        world.engine.execute(f"CREATE SOURCE other WITH ({options})")
    assert caught.value.code == "SOURCE_SLOT_FOREIGN"
    assert world.source_rows("pg_publication WHERE pubname = 'left over'") == []
    world.sql("SELECT pg_drop_replication_slot('other')")
    world.sql("INSERT INTO lists VALUES ('{1,NULL}')")
    world.capture("public.lists", "lists", "arrays='string'")
    world.live("lists")
    assert world.rows("lists") == [("{1,NULL}",)]


def test_a_source_without_tables_is_read_so_that_its_log_does_not_grow(world: World, tmp_path: Path) -> None:
    world.engine.execute(f"CREATE SOURCE idle WITH ({source_options(world, tmp_path, slot_name='idle')})")

    def confirmed() -> int:
        row = world.db.execute(
            "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'idle'"
        ).fetchone()
        return lsn(row[0]) if row else 0

    world.sql("CREATE TABLE elsewhere AS SELECT * FROM generate_series(1, 1000)")
    row = world.db.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
    assert row is not None
    world.until(lambda: confirmed() >= lsn(row[0]), 60)
    world.engine.execute("DROP SOURCE idle")
    assert confirmed() == 0


def test_caught_up_is_reached_also_while_the_source_goes_on(world: World) -> None:
    world.sql("CREATE TABLE busy (id serial PRIMARY KEY, v int)")
    stop = threading.Event()

    def write() -> None:
        with world.server.connect() as conn:
            while not stop.wait(0.002):
                conn.execute("INSERT INTO busy (v) VALUES (1)")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        world.capture("public.busy", "busy")
        world.live("busy")
        world.until(world.engine.caught_up, 60)
    finally:
        stop.set()
        writer.join()


def test_what_was_there_is_used_and_stays_and_missing_rights_come_with_the_sql(world: World, tmp_path: Path) -> None:
    world.sql("CREATE TABLE owned (id int PRIMARY KEY); CREATE TABLE foreign_one (id int PRIMARY KEY)")
    world.sql("CREATE PUBLICATION theirs FOR TABLE owned")
    world.sql("SELECT pg_create_logical_replication_slot('theirs', 'pgoutput')")
    world.sql("CREATE ROLE limited LOGIN REPLICATION PASSWORD 'limited'; GRANT SELECT ON owned, foreign_one TO limited")
    options = as_role("limited", tmp_path) | {"slot_name": "theirs", "publication_name": "theirs"}
    world.engine.execute(f"CREATE SOURCE theirs WITH ({source_options(world, tmp_path, **options)})")
    world.engine.execute("CREATE TABLE owned (*) FROM theirs TABLE 'public.owned'")
    world.live("owned")
    with pytest.raises(HeadwaterError) as caught:
        world.engine.execute("CREATE TABLE foreign_one (*) FROM theirs TABLE 'public.foreign_one'")
    assert caught.value.code == "SOURCE_PERMISSION"
    assert 'ALTER PUBLICATION "theirs" ADD TABLE "public"."foreign_one"' in caught.value.hint
    options |= {"publication_name": "none", "slot_name": "none"}
    with pytest.raises(HeadwaterError) as caught:
        world.engine.execute(f"CREATE SOURCE none WITH ({source_options(world, tmp_path, **options)})")
    assert 'CREATE PUBLICATION "none"' in caught.value.hint
    world.engine.execute("DROP SOURCE theirs CASCADE")
    found = world.db.execute(
        "SELECT count(*) FROM pg_publication WHERE pubname = 'theirs' UNION ALL "
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'theirs'"
    ).fetchall()
    assert found == [(1,), (1,)]


def test_splits_that_a_job_had_read_before_its_connection_was_cut_are_kept(world: World, tmp_path: Path) -> None:
    """One job reads all splits in turn, and no connection lives long enough for half of them."""
    world.sql(
        "CREATE TABLE cut_off (id int PRIMARY KEY, v text);"
        "INSERT INTO cut_off SELECT i, repeat(md5(i::text), 4) FROM generate_series(1, 10000) i; ANALYZE cut_off"
    )
    with TcpProxy(world.server.port) as proxy:
        options = source_options(world, tmp_path, port=str(proxy.port), slot_name="cuts", publication_name="cuts")
        world.engine.execute(f"CREATE SOURCE cuts WITH ({options})")
        proxy.cut_after(600_000)
        world.engine.execute(
            "CREATE TABLE cut_off (*) FROM cuts TABLE 'public.cut_off' WITH (backfill.num_rows_per_split='1000')"
        )
        world.live("cut_off")
        assert len(world.splits("cut_off")) >= 8
        assert any(e["name"] == "cut_off" for e in world.engine.status()["errors"])
        assert world.rows("cut_off") == world.source_rows("cut_off")
        assert not list((world.data / "staging").rglob("*.json"))
        world.engine.execute("DROP TABLE cut_off; DROP SOURCE cuts")


def test_rows_that_the_role_may_not_see_are_an_error_and_never_left_out(world: World, tmp_path: Path) -> None:
    """The stream has them, whatever the role may read: a copy without them would be another table."""
    world.sql(
        "CREATE TABLE hidden (id int PRIMARY KEY, v int); INSERT INTO hidden SELECT i, 0 FROM generate_series(1, 9) i"
    )
    world.sql("CREATE ROLE blind LOGIN REPLICATION PASSWORD 'blind'; CREATE PUBLICATION blind FOR TABLE hidden")
    options = as_role("blind", tmp_path) | {"slot_name": "blind", "publication_name": "blind"}
    world.engine.execute(f"CREATE SOURCE blind WITH ({source_options(world, tmp_path, **options)})")
    capture = "CREATE TABLE hidden (*) FROM blind TABLE 'public.hidden'"
    with pytest.raises(UsageError) as caught:
        world.engine.execute(capture)
    assert (caught.value.code, 'GRANT SELECT ON "public"."hidden"' in caught.value.hint) == ("SOURCE_PERMISSION", True)
    world.sql("GRANT SELECT ON hidden TO blind; ALTER TABLE hidden ENABLE ROW LEVEL SECURITY")
    world.sql("CREATE POLICY few ON hidden USING (id < 4)")
    with pytest.raises(UsageError) as caught:
        world.engine.execute(capture)
    assert (caught.value.code, "BYPASSRLS" in caught.value.hint) == ("SOURCE_PERMISSION", True)
    world.sql("ALTER TABLE hidden DISABLE ROW LEVEL SECURITY")
    world.engine.execute(capture)
    world.live("hidden")
    # The same while it is there: what it has stays, and the error says why there is no new copy.
    world.sql("ALTER TABLE hidden ENABLE ROW LEVEL SECURITY")
    world.engine.execute("RESYNC hidden")
    world.until(lambda: world.state("hidden") == "failed")
    assert len(world.rows("hidden")) == 9
    assert "row-level security" in world.engine.status()["errors"][-1]["message"]
    world.sql("ALTER ROLE blind WITH BYPASSRLS; UPDATE hidden SET v = 1")
    world.engine.execute("RESYNC hidden")
    world.live("hidden")
    world.until(lambda: world.rows("hidden") == world.source_rows("hidden"))
    world.engine.execute("DROP SOURCE blind CASCADE")
