"""System parameters and secrets by reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.config import check_master, check_secrets, masked, parse_parameter, resolve_secret, reveal
from headwater.errors import UsageError


def test_unknown_parameter_gets_a_suggestion() -> None:
    with pytest.raises(UsageError) as caught:
        parse_parameter("barrier_interval", "5")
    assert caught.value.code == "UNKNOWN_PARAMETER"
    assert "barrier_interval_ms" in caught.value.hint


@pytest.mark.parametrize("text", ["", "x", "-1", "99999999", "1.5"])
def test_parameter_out_of_bounds_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_parameter("barrier_interval_ms", text)
    assert caught.value.code == "PARAMETER_RANGE"


@pytest.mark.parametrize("master", ["", "nosuch", "local[x]", "local[2", "spark://", "local-cluster[2]", "spark//h:1"])
def test_what_is_no_master_of_spark_is_refused(master: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_master(master)
    assert caught.value.code == "OPTION_VALUE" and "--master local[*]" in caught.value.hint


@pytest.mark.parametrize(
    "master",
    ["local", "local[*]", "local[4]", "local[*, 3]", "local-cluster[2, 1, 1024]", "yarn", "spark://h:1", "k8s://h"],
)
def test_masters_of_spark_are_taken(master: str) -> None:
    check_master(master)


def test_secret_is_read_from_the_environment_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "s3cret")
    assert resolve_secret("${SOME_SECRET}") == "s3cret"
    monkeypatch.delenv("SOME_SECRET")
    with pytest.raises(UsageError) as caught:
        resolve_secret("${SOME_SECRET}")
    assert caught.value.code == "SECRET_MISSING"


def test_secret_is_read_from_a_file_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from file\n")
    assert resolve_secret(f"${{file:{tmp_path}/secret}}") == "from file"


@pytest.mark.parametrize(
    "name",
    [
        *("password", "ssl.password", "sasl_password", "token", "Password", "PASSWD", "db.pwd", "ssl.key.passphrase"),
        *("properties.ssl.key.pem", "properties.sasl.oauthbearer.config", "properties.sasl.jaas.config"),
        *("storage.azure_storage_sas", "storage.azure_storage_sas_token", "storage.azure_storage_connection_string"),
        *("storage.aws_secret_access_key", "storage.AWS_SESSION_TOKEN", "storage.azure_storage_account_key"),
        *("catalog.s3.secret-access-key", "catalog.credential", "catalog.adls.account-key", "storage.account_key"),
        *("storage.google_service_account_key", "private_key", "api.key", "encryptionKey", "storage.access.key"),
    ],
)
def test_literal_secret_is_refused_and_not_repeated(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_secrets({name: "hunter2"})
    assert caught.value.code == "LITERAL_SECRET"
    assert "hunter2" not in caught.value.render()


def test_reference_and_other_options_pass() -> None:
    check_secrets({"password": "${PGPASSWORD}", "ssl.password": "${file:/run/secret}", "hostname": "db"})
    plain = ("primary_key", "ssl.key", "properties.ssl.key.location", "storage.aws_access_key_id", "public.key", "path")
    plain += ("properties.sasl.oauthbearer.token.endpoint.url", "properties.sasl.mechanism", "properties.sasl.username")
    plain += ("storage.aws_web_identity_token_file", "storage.google_application_credentials", "topic", "ssl.mode")
    check_secrets(dict.fromkeys(plain, "in clear"))
    check_secrets({"storage.aws_skip_signature": "true"})


@pytest.mark.parametrize(
    "value",
    [
        *(
            "http://user:hunter2@host:8081",
            "http://a:${PW}@one,http://b:hunter2@two",
            "postgresql+psycopg2://u:hunter2@h/d",
        ),
        *("s3://key:hunter2@bucket/x", "http://user:x${PW}@host", "https://user:hunter2/with/slash@host/path"),
        *(
            "https://x.blob.core.windows.net/c?sv=1&sig=hunter2",
            "http://h/?password=hunter2",
            "http://h/?x=1&token=hunter2",
        ),
    ],
)
@pytest.mark.parametrize("name", ["path", "schema.registry.url", "properties.bootstrap.server", "catalog.uri"])
def test_a_secret_inside_of_a_url_is_refused_whatever_the_option(name: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_secrets({name: value})
    assert caught.value.code == "LITERAL_SECRET"
    assert "hunter2" not in caught.value.render()


def test_a_pair_with_a_secret_is_refused_where_such_a_value_is_a_list_of_pairs() -> None:
    with pytest.raises(UsageError, match="LITERAL_SECRET"):
        check_secrets({"catalog.dsn": "host=db password=hunter2"})
    check_secrets({"catalog.dsn": "host=db password=${PW}", "table.name": "a password=b"})


@pytest.mark.parametrize(
    "value",
    [
        *(
            "http://user:${PW}@host:8081",
            "http://${USER}:${file:/run/pw}@host",
            "http://user@host",
            "http://host:8081/a@b",
        ),
        *(
            "s3://bucket/token=1/x",
            "file:///lake/a:b@c",
            "http://[::1]:8081/x@y",
            "https://h/?sig=${SAS}",
            "no url: a@b",
        ),
    ],
)
def test_urls_without_a_secret_or_with_a_reference_pass(value: str) -> None:
    check_secrets({"path": value, "schema.registry.url": value})


def test_a_secret_in_a_url_may_hold_any_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODD_SECRET", "p@ss/w:rd?#%")
    assert reveal("http://u:${ODD_SECRET}@h/x") == "http://u:p%40ss%2Fw%3Ard%3F%23%25@h/x"
    assert reveal("${ODD_SECRET}") == "p@ss/w:rd?#%"


def test_what_was_resolved_is_masked_in_the_texts_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODD_SECRET", "hunter2 & co")
    resolve_secret("${ODD_SECRET}")
    assert masked("cannot connect to http://u:hunter2%20%26%20co@h") == "cannot connect to http://u:***@h"
    assert masked("password 'hunter2 & co' refused") == "password '***' refused"
