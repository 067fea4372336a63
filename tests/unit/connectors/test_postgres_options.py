"""What is said of a source's options and of others at its server, without a server."""

from __future__ import annotations

import pytest

from headwater.connectors.postgres.client import PostgresConfig, may_be_read_by_others
from headwater.connectors.postgres.slots import SlotHolder
from headwater.errors import UsageError


def config(**more: str) -> PostgresConfig:
    options = {"hostname": "db.example", "username": "app", "database.name": "shop"}
    return PostgresConfig.from_options({**options, **{k.replace("_", "."): v for k, v in more.items()}})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "/var/run/postgresql"])
def test_connection_that_stays_on_this_machine_is_not_warned_of(host: str) -> None:
    assert may_be_read_by_others(config(hostname=host)) == ""


@pytest.mark.parametrize("host", ["db.example", "10.0.0.7", "localhost.example", "::ffff:10.0.0.7"])
def test_connection_that_may_be_in_clear_is_warned_of_unless_somebody_decided_so(host: str) -> None:
    assert "ssl.mode is prefer" in may_be_read_by_others(config(hostname=host))
    assert "ssl.mode is allow" in may_be_read_by_others(config(hostname=host, ssl_mode="allow"))
    for mode in ("disable", "require", "verify-ca", "verify-full"):
        assert may_be_read_by_others(config(hostname=host, ssl_mode=mode)) == ""


def test_every_connection_has_the_certificates_that_were_given() -> None:
    given = config(ssl_mode="verify-full", ssl_root_cert="/ca", ssl_cert="/c", ssl_key="/k").conninfo()
    assert [given[k] for k in ("sslmode", "sslrootcert", "sslcert", "sslkey")] == ["verify-full", "/ca", "/c", "/k"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("slot.name", "It's"),
        ("slot.name", "a" * 64),
        ("slot.name", ""),
        ("publication.name", "é" * 32),
        ("publication.name", ""),
        ("schema.name", "a\0b"),
        ("ssl.cert", ""),
    ],
)
def test_names_that_the_server_would_not_keep_are_refused(option: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"option {option} has an invalid value"):
        config(**{option: value})


def test_process_that_holds_a_slot_is_named_and_nothing_of_its_name_reaches_a_terminal() -> None:
    assert str(SlotHolder(7, "app", "evil\x1b[2J\nname", "10.0.0.7")) == (
        "process 7 (user app, application evil\\x1b[2J\\x0aname, from 10.0.0.7)"
    )
    assert str(SlotHolder(7, "", "", "")) == "process 7"
