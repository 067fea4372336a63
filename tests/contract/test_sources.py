"""The contract of sources (`headwater.testing.check_source`) held against Postgres, Debian's and a newer one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from headwater.connectors.postgres.client import PostgresConfig
from headwater.connectors.postgres.source import PostgresSource
from headwater.testing.check_source import CHECKS, SourceUnderTest
from headwater.testing.servers import PostgresServer
from postgres_versions import SERVERS

pytestmark = pytest.mark.postgres
_databases = itertools.count(1)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_postgres_source(
    check: Callable[[SourceUnderTest], None],
    server: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: PostgresServer = request.getfixturevalue(server)
    name = f"contract_{next(_databases)}"
    dsn = found.create_database(name)
    monkeypatch.setenv("HW_TEST_PASSWORD", found.password)
    options = {
        "hostname": found.host,
        "port": str(found.port),
        "username": found.user,
        "password": "${HW_TEST_PASSWORD}",
        "database.name": name,
        "slot.name": name,
        "heartbeat.interval.ms": "1000",
    }
    slot = PostgresSource(PostgresConfig.from_options(options))
    test = SourceUnderTest(
        open=lambda: PostgresSource.from_options(options),
        connect=lambda: psycopg.connect(dsn),
        schema="public",
        folder=tmp_path,
    )
    if check.__name__ == "check_first_read_waits_for_open_transactions":
        # A slot that is made waits by itself for the transaction that is open in this check.
        slot.prepare_table(slot.catalogue.describe("public", test.table()))
    try:
        check(test)
    finally:
        slot.made["slot"] = True
        slot.release()
