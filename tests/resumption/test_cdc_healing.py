"""Streams that cannot be continued: noticed, reported with a code, and healed by a new copy, never by a silent jump."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cdc_world import World, open_world
from unreadable_slot import make_unreadable

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("healing") / "data"


@pytest.fixture(scope="module")
def world(data: Path) -> Iterator[World]:
    with open_world(data) as found:
        found.sql("CREATE TABLE kept (id int PRIMARY KEY, v int)")
        found.sql("INSERT INTO kept SELECT i, 0 FROM generate_series(1, 500) i; ANALYZE kept")
        found.capture("public.kept", "kept", "backfill.num_rows_per_split='100'")
        found.live("kept")
        yield found


def healed(world: World, code: str) -> None:
    world.until(lambda: any(e["code"] == code for e in world.engine.status()["errors"]))
    world.until(lambda: slot_is_active(world))
    # The error is told before the new copy begins, and until that is complete the table holds what it had.
    world.until(lambda: world.state("kept") == "live" and world.rows("kept") == world.source_rows("kept"))
    world.sql("UPDATE kept SET v = v + 1 WHERE id % 7 = 0")
    world.assert_equal("kept", "kept")


def slot_is_active(world: World) -> bool:
    row = world.db.execute("SELECT active FROM pg_replication_slots WHERE slot_name = 'headwater'").fetchone()
    return row is not None and bool(row[0])


def test_a_damaged_spool_file_heals_by_a_new_copy(world: World, data: Path) -> None:
    world.engine.execute("PAUSE")
    try:
        world.sql("UPDATE kept SET v = v + 1; DELETE FROM kept WHERE id < 20")
        end = world.db.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        world.until(lambda: end is not None and acknowledged(world) >= 1 and spool_bytes(data) > 1000)
        world.until(lambda: caught(world))
        newest = max((data / "spool").rglob("*.spool"), key=lambda p: p.stat().st_size)
        raw = bytearray(newest.read_bytes())
        raw[len(raw) // 2] ^= 0x55
        newest.write_bytes(bytes(raw))
    finally:
        world.engine.execute("RESUME")
    healed(world, "SPOOL_DAMAGED")


def test_a_spool_file_that_is_not_there_is_waited_for_and_the_stream_is_kept(world: World, data: Path) -> None:
    spools = {p.name for p in (data / "spool").iterdir()}
    world.engine.execute("PAUSE")
    try:
        world.sql("UPDATE kept SET v = v + 1 WHERE id % 3 = 0")
        world.until(lambda: caught(world))
        newest = max((data / "spool").rglob("*.spool"), key=lambda p: p.stat().st_mtime)
        newest.rename(newest.with_suffix(".away"))
    finally:
        world.engine.execute("RESUME")
    world.until(lambda: any(e["code"] == "SPOOL_MISSING" for e in world.engine.status()["errors"]))
    assert {p.name for p in (data / "spool").iterdir()} == spools
    newest.with_suffix(".away").rename(newest)
    world.until(lambda: world.rows("kept") == world.source_rows("kept"))
    assert {p.name for p in (data / "spool").iterdir()} == spools  # nor was anything copied again


def spool_bytes(data: Path) -> int:
    return sum(p.stat().st_size for p in (data / "spool").rglob("*.spool"))


def acknowledged(world: World) -> int:
    row = world.db.execute("SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots").fetchone()
    return int(row[0]) if row else 0


def caught(world: World) -> bool:
    row = world.db.execute("SELECT pg_current_wal_lsn() - confirmed_flush_lsn FROM pg_replication_slots").fetchone()
    return row is not None and int(row[0]) < 2000


def test_a_slot_that_somebody_moved_on_heals_by_a_new_copy(world: World) -> None:
    world.settle()
    world.until(lambda: slot_was_moved(world))
    healed(world, "SOURCE_SLOT_AHEAD")


def slot_was_moved(world: World) -> bool:
    """The reader connects again at once: whoever moves its slot must be quicker."""
    world.sql("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 'headwater'")
    world.sql("UPDATE kept SET v = v + 100 WHERE id % 50 = 1; DELETE FROM kept WHERE id % 50 = 2")
    try:
        world.sql("SELECT pg_replication_slot_advance('headwater', pg_current_wal_lsn())")
    except psycopg.errors.ObjectInUse:
        return False
    return True


def test_a_slot_that_the_server_cannot_decode_any_more_is_made_anew_while_running(world: World, tmp_path: Path) -> None:
    world.settle()
    world.db.close()
    handed = {s["handed_over_epoch"] for s in world.splits("kept")}
    writes = ["UPDATE kept SET v = v + 1 WHERE id % 3 = 0", "DELETE FROM kept WHERE id % 100 = 5"]
    make_unreadable(world.server, "headwater", "kept", writes, tmp_path / "slot")
    world.db = world.server.connect()
    healed(world, "SOURCE_SLOT_UNREADABLE")
    assert handed.isdisjoint(s["handed_over_epoch"] for s in world.splits("kept"))
    error = next(e for e in world.engine.status()["errors"] if e["code"] == "SOURCE_SLOT_UNREADABLE")
    assert "could not map file" in error["message"] and "a new slot is made" in error["hint"] and error["retrying"]


def test_a_table_that_is_gone_does_not_keep_the_others_from_healing(world: World) -> None:
    world.sql("CREATE TABLE gone (id int PRIMARY KEY); INSERT INTO gone VALUES (1)")
    world.capture("public.gone", "gone")
    world.live("gone")
    world.settle()
    world.sql("DROP TABLE gone")
    world.until(lambda: slot_was_moved(world))
    healed(world, "SOURCE_SLOT_AHEAD")
    world.until(lambda: world.state("gone") == "failed")
    world.engine.execute("DROP TABLE gone")


def test_a_source_restored_from_a_backup_heals_by_a_new_copy(world: World, tmp_path: Path) -> None:
    server = world.server
    world.settle()
    world.db.close()
    server.stop()
    shutil.copytree(server.data, tmp_path / "backup", symlinks=True)
    server.start()
    world.db = server.connect()
    for number in range(20):
        world.sql(f"INSERT INTO kept SELECT 1000 + {number} * 100 + i, i FROM generate_series(1, 100) i")
    world.assert_equal("kept", "kept")
    world.db.close()
    server.stop()
    owner = server.data.stat()
    shutil.rmtree(server.data)
    shutil.copytree(tmp_path / "backup", server.data, symlinks=True)
    for path in [server.data, *server.data.rglob("*")]:
        shutil.chown(path, owner.st_uid, owner.st_gid)
    server.data.chmod(0o700)
    server.start()
    world.db = server.connect()
    healed(world, "SOURCE_RESTORED")
