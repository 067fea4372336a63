"""The meta store's contract on SQLite and on a real Postgres, and what only one of them can show."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from headwater.errors import DefiniteError, HeadwaterError, TransientError, UsageError
from headwater.storage import tables
from headwater.storage.checkpoint import Contribution
from headwater.storage.meta import MAIN_LANE, MetaStore
from headwater.testing.check_meta_store import CHECKS
from headwater.testing.servers import PostgresServer

MakeStore = Callable[[str], MetaStore]
VERSION_1 = Path(__file__).with_name("meta-v1.sql")


@pytest.fixture
def opened() -> Iterator[list[MetaStore]]:
    stores: list[MetaStore] = []
    yield stores
    for store in stores:
        store.close()


@pytest.fixture
def sqlite_store(tmp_path: Path, opened: list[MetaStore]) -> MakeStore:
    def make(name: str) -> MetaStore:
        opened.append(MetaStore(f"sqlite:///{tmp_path}/{name}.db"))
        return opened[-1]

    return make


@pytest.fixture
def postgres_store(postgres15: PostgresServer, opened: list[MetaStore], tmp_path: Path) -> MakeStore:
    salt = hashlib.sha1(str(tmp_path).encode()).hexdigest()[:8]
    base = f"postgresql+psycopg://postgres:{postgres15.password}@{postgres15.host}:{postgres15.port}/postgres"

    def make(name: str) -> MetaStore:
        schema = f"m{salt}_{hashlib.sha1(name.encode()).hexdigest()[:8]}"
        with psycopg.connect(base.replace("+psycopg", ""), autocommit=True) as db:
            db.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        opened.append(MetaStore(f"{base}?options={quote(f'-csearch_path={schema}')}"))
        return opened[-1]

    return make


@pytest.mark.parametrize("check", sorted(CHECKS))
def test_sqlite(check: str, sqlite_store: MakeStore) -> None:
    CHECKS[check](sqlite_store, check)


@pytest.mark.postgres
@pytest.mark.parametrize("check", sorted(CHECKS))
def test_postgres(check: str, postgres_store: MakeStore) -> None:
    CHECKS[check](postgres_store, check)


# -- schema versions -------------------------------------------------------------------------------------------------


def _set_version(make: MakeStore, version: str) -> None:
    store = make("v")
    store.set_setting("schema_version", version)
    store.close()


def _newer_is_refused(make: MakeStore) -> None:
    _set_version(make, str(tables.SCHEMA_VERSION + 1))
    with pytest.raises(UsageError) as raised:
        make("v")
    assert raised.value.code == "META_STORE_NEWER"


def _older_is_migrated(make: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = make("v")
    owner.acquire()
    owner.commit_checkpoint(MAIN_LANE, 5, Contribution(positions={1: "x"}), seq_high=3)
    now = tables.SCHEMA_VERSION
    monkeypatch.setattr(tables, "SCHEMA_VERSION", now + 2)
    steps = {
        **tables.MIGRATIONS,
        now: ["CREATE TABLE extra (a INTEGER)", "INSERT INTO extra VALUES (1)"],
        now + 1: ["ALTER TABLE extra ADD COLUMN b INTEGER", "no such statement"],
    }
    monkeypatch.setattr(tables, "MIGRATIONS", steps)
    with pytest.raises(HeadwaterError):
        make("v")
    assert owner.setting("schema_version") == str(now)
    steps[now + 1].pop()
    migrated = make("v")
    assert migrated.setting("schema_version") == str(now + 2)
    assert (migrated.committed_epoch(), migrated.position(1), migrated.seq_high) == (5, "x", 3)
    with migrated.read() as db:
        assert [tuple(r) for r in db.exec_driver_sql("SELECT a, b FROM extra")] == [(1, None)]
    assert make("v").setting("schema_version") == str(now + 2)


def test_sqlite_of_a_newer_headwater_is_refused(sqlite_store: MakeStore) -> None:
    _newer_is_refused(sqlite_store)


def test_sqlite_of_an_older_headwater_is_migrated_as_a_whole(
    sqlite_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _older_is_migrated(sqlite_store, monkeypatch)


@pytest.mark.postgres
def test_postgres_of_a_newer_headwater_is_refused(postgres_store: MakeStore) -> None:
    _newer_is_refused(postgres_store)


@pytest.mark.postgres
def test_postgres_of_an_older_headwater_is_migrated_as_a_whole(
    postgres_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _older_is_migrated(postgres_store, monkeypatch)


# -- broken and unusable stores --------------------------------------------------------------------------------------


def test_a_file_that_is_no_database_is_said_to_be_broken(tmp_path: Path) -> None:
    (tmp_path / "meta.db").write_bytes(b"this is not a database, and it is long enough to be looked at" * 40)
    with pytest.raises(DefiniteError) as raised:
        MetaStore(f"sqlite:///{tmp_path}/meta.db")
    assert raised.value.code == "META_STORE_BROKEN"


def test_a_damaged_file_is_said_to_be_broken(tmp_path: Path) -> None:
    store = MetaStore(f"sqlite:///{tmp_path}/meta.db")
    store.acquire()
    store.close()
    with sqlite3.connect(tmp_path / "meta.db") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    data = bytearray((tmp_path / "meta.db").read_bytes())
    data[100:] = b"\xff" * (len(data) - 100)
    (tmp_path / "meta.db").write_bytes(data)
    with pytest.raises(DefiniteError) as raised:
        MetaStore(f"sqlite:///{tmp_path}/meta.db").acquire()
    assert raised.value.code == "META_STORE_BROKEN"


def test_a_store_without_a_version_is_said_to_be_broken(sqlite_store: MakeStore) -> None:
    _set_version(sqlite_store, "soon")
    with pytest.raises(DefiniteError) as raised:
        sqlite_store("v")
    assert raised.value.code == "META_STORE_BROKEN"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("nosuchdatabase://x", "META_STORE_URL"),
        ("sqlite:////nonexistent-directory/meta.db", "META_STORE_UNAVAILABLE"),
        ("postgresql+psycopg://u:secretword@127.0.0.1:1/x", "META_STORE_UNAVAILABLE"),
    ],
)
def test_a_store_that_cannot_be_opened_says_so_without_secrets(url: str, code: str) -> None:
    with pytest.raises(HeadwaterError) as raised:
        MetaStore(url)
    assert raised.value.code == code
    assert "secretword" not in raised.value.render()


@pytest.mark.postgres
def test_a_backend_that_is_killed_in_a_commit_leaves_nothing(
    postgres15: PostgresServer, postgres_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = postgres_store("killed")
    store.acquire()
    check = store._check_order

    def kill_us(db, lane, epoch):  # type: ignore[no-untyped-def]
        check(db, lane, epoch)
        pid = db.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        with store.engine.connect() as other:
            other.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")

    monkeypatch.setattr(store, "_check_order", kill_us)
    with pytest.raises(HeadwaterError) as raised:
        store.commit_checkpoint(MAIN_LANE, 5, Contribution(positions={1: "x"}), seq_high=3)
    assert raised.value.code == "META_STORE_UNAVAILABLE"
    monkeypatch.undo()
    store.settle()
    assert store.committed_epoch() == 0
    store.commit_checkpoint(MAIN_LANE, 5, Contribution(positions={1: "x"}), seq_high=3)
    assert store.position(1) == "x"


@pytest.mark.postgres
def test_a_session_that_holds_the_owners_row_is_named_and_nothing_waits_for_ever(
    postgres_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.storage.meta.LOCK_TIMEOUT_S", 1)
    store = postgres_store("held")
    store.acquire()
    with store.engine.connect() as other:
        pid = other.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        other.exec_driver_sql("SELECT * FROM owner FOR UPDATE")
        for action in (
            store.settle,
            store.acquire,
            lambda: store.commit_checkpoint(MAIN_LANE, 5, Contribution(positions={1: "x"}), seq_high=3),
        ):
            with pytest.raises(TransientError) as raised:
                action()
            assert raised.value.code == "META_STORE_LOCKED"
            assert (
                f"session {pid} of the server" in raised.value.detail and "idle in transaction" in raised.value.detail
            )
            assert f"pg_terminate_backend({pid})" in raised.value.hint
        store.require_owner()  # only looks
    store.commit_checkpoint(MAIN_LANE, 5, Contribution(positions={1: "x"}), seq_high=3)


# -- directories of earlier builds -----------------------------------------------------------------------------------


def _holds_what_version_1_held(store: MetaStore) -> None:
    assert store.setting("schema_version") == str(tables.SCHEMA_VERSION)
    (error,) = store.error_rows()
    assert error["code"] == "SOURCE_UNREACHABLE" and error["ended_at"] is None
    assert [r["path"] for r in store.dead_letter_rows(2, ["letters/a.parquet"])] == ["letters/a.parquet"]
    assert [s.path for s in store.segments_at(1, 5)] == ["tables/1/a.parquet"]
    store.acquire()
    store.commit_checkpoint(MAIN_LANE, 9, Contribution(jobs_dropped=[2]), seq_high=8)
    store.end_errors(1, "orders", "SOURCE_UNREACHABLE", upto_s=2.0)
    assert store.error_rows()[0]["ended_at"] is not None
    assert store.expire(9) == ["letters/a.parquet"]
    assert store.committed_epoch("view gone") == 0 and store.committed_epoch() == 9


def test_sqlite_of_version_1_opens_and_goes_on(tmp_path: Path, sqlite_store: MakeStore) -> None:
    with sqlite3.connect(tmp_path / "v1.db") as db:
        db.executescript(VERSION_1.read_text(encoding="utf-8"))
    db.close()
    _holds_what_version_1_held(sqlite_store("v1"))


@pytest.mark.postgres
def test_postgres_of_version_1_opens_and_goes_on(postgres_store: MakeStore) -> None:
    store = postgres_store("v1")
    inserts = [line for line in VERSION_1.read_text(encoding="utf-8").splitlines() if line.startswith("INSERT")]
    with store.write() as db:
        db.exec_driver_sql("ALTER TABLE errors DROP COLUMN ended_at")
        db.exec_driver_sql("DROP INDEX dead_letters_by_sink")
        db.exec_driver_sql("DROP INDEX segments_present")
        for table in ("settings", "owner"):
            db.exec_driver_sql(f"DELETE FROM {table}")
        for line in inserts:
            db.exec_driver_sql(_for_postgres(line))
    _holds_what_version_1_held(postgres_store("v1"))


def _for_postgres(line: str) -> str:
    """Booleans: SQLite has numbers for them."""
    line = line.replace("'delta', 1,", "'delta', true,").replace("'what to do', 1)", "'what to do', true)")
    return line.replace("'letters/a.parquet', 2, 0)", "'letters/a.parquet', 2, false)")
