"""TLS to the targets of sinks, against real servers: offered or not, trusted or not."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import TransientError, UsageError
from headwater.model.schema import Column
from headwater.sink import tls
from headwater.sink.registry import open_sink
from headwater.testing.servers import PostgresServer
from sink_targets import MARIADB, mariadb_server

COLUMNS = (Column("id", "BIGINT", nullable=False), Column("v", "STRING"))


def certificate(folder: Path, name: str, address: str = "127.0.0.1") -> tuple[Path, Path]:
    """A certificate that is its own authority, and its key."""
    folder.mkdir(exist_ok=True)
    key, made = folder / f"{name}.key", folder / f"{name}.crt"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-days", "2"]
    names = ["-addext", f"subjectAltName=IP:{address}", "-keyout", str(key), "-out", str(made)]
    subprocess.run([*make, *names], check=True, capture_output=True)
    return made, key


def _reveal(reference: str) -> str:
    """The password of a Postgres is in the reference itself here, MariaDB's in the environment."""
    name = reference[2:-1]
    return os.environ.get(name, name)


@contextmanager
def opened(options: dict[str, str], **more: str) -> Iterator[Any]:
    given = {**options, **{f"ssl.{k}": v for k, v in more.items()}}
    sink = open_sink("encrypted", given, COLUMNS, ("id",), 1, _reveal)
    try:
        sink.validate(COLUMNS, ("id",))
        yield sink
    finally:
        sink.close()


def refused(options: dict[str, str], **more: str) -> str:
    with pytest.raises(TransientError) as caught, opened(options, **more):
        pass
    assert caught.value.code == "SINK_TLS" and "ssl.mode" in caught.value.hint
    return caught.value.detail


def held_to_the_table(clear: dict[str, str], encrypted: dict[str, str], root: Path, wrong: Path, is_tls: Any) -> None:
    """What docs/sinks.md says of `ssl.mode`, for a server without and one with TLS."""
    for mode in ("disable", "allow", "prefer"):
        with opened(clear, mode=mode) as sink:
            assert not is_tls(sink)
    for mode in ("require", "verify-ca", "verify-full"):
        assert "offers no TLS" in refused(clear, mode=mode, **{"root.cert": str(root)})
    with opened(encrypted, mode="disable") as sink:
        assert not is_tls(sink)
    for more in ({"mode": "prefer"}, {"mode": "require"}):
        with opened(encrypted, **more) as sink:
            assert is_tls(sink)
    for mode in ("require", "verify-ca", "verify-full"):
        with opened(encrypted, mode=mode, **{"root.cert": str(root)}) as sink:
            assert is_tls(sink)
        assert "refused" in refused(encrypted, mode=mode, **{"root.cert": str(wrong)})
    # The certificate is for 127.0.0.1 alone.
    other = {**encrypted, "hostname": "localhost"}
    assert "refused" in refused(other, mode="verify-full", **{"root.cert": str(root)})
    with opened(other, mode="verify-ca", **{"root.cert": str(root)}) as sink:
        assert is_tls(sink)


@pytest.mark.postgres
@pytest.mark.skipif(not PostgresServer.available("15"), reason="no Postgres 15 here")
def test_a_connection_to_postgres_is_as_safe_as_its_mode_says(tmp_path: Path) -> None:
    wrong, _ = certificate(tmp_path / "wrong", "127.0.0.1")

    def is_tls(sink: Any) -> bool:
        row = sink._connect().execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone()
        return bool(row[0])

    with PostgresServer("15") as plain, PostgresServer("15") as server:
        root, key = certificate(tmp_path / "server", "127.0.0.1")
        made = server.offer_tls()  # for localhost too; ours is for the address alone
        made.write_bytes(root.read_bytes())
        made.with_suffix(".key").write_bytes(key.read_bytes())
        server.restart()
        logins = [
            {"connector": "postgres", "hostname": s.host, "port": str(s.port), "username": s.user}
            | {"password": f"${{{s.password}}}", "database.name": "postgres", "table.name": "t"}
            for s in (plain, server)
        ]
        held_to_the_table(logins[0], logins[1], root, wrong, is_tls)


@pytest.mark.skipif(not MARIADB.exists(), reason="no MariaDB here")
def test_a_connection_to_mariadb_is_as_safe_as_its_mode_says(tmp_path: Path) -> None:
    wrong, _ = certificate(tmp_path / "wrong", "127.0.0.1")
    tmp_path.chmod(0o755)

    def is_tls(sink: Any) -> bool:
        with sink._connect().cursor() as cursor:
            cursor.execute("SHOW STATUS LIKE 'Ssl_cipher'")
            return bool(cursor.fetchone()[1])

    root, key = certificate(tmp_path / "server", "127.0.0.1")
    with mariadb_server() as plain, mariadb_server(certificate=root, key=key) as port:
        logins = [
            {"connector": "mariadb", "hostname": "127.0.0.1", "port": str(p), "username": "headwater"}
            | {"password": "${HEADWATER_TEST_PASSWORD}", "database.name": "shop", "table.name": "t"}
            for p in (plain, port)
        ]
        held_to_the_table(logins[0], logins[1], root, wrong, is_tls)


def test_a_certificate_that_cannot_be_read_is_an_error_of_its_own() -> None:
    options = {"connector": "mysql", "hostname": "127.0.0.1", "port": "1", "username": "u", "database.name": "d"}
    with pytest.raises(UsageError, match="SINK_TLS"), opened({**options, "table.name": "t"}, cert="/nowhere.crt"):
        pass


def test_a_mode_that_protects_nothing_is_said_unless_the_target_is_this_machine(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        for host in ("localhost", "127.0.0.1", "::1", "/var/run/postgresql"):
            tls.warn_if_open("sink s", host, "prefer")
        tls.warn_if_open("sink s", "dwh", "verify-full")
        assert caplog.text == ""
        tls.warn_if_open("sink s", "dwh", "prefer")
    assert "ssl.mode=prefer" in caplog.text and "dwh" in caplog.text
