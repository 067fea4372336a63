"""System parameters and secrets by reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.config import check_master, check_secrets, parse_parameter, resolve_secret
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


@pytest.mark.parametrize("name", ["password", "ssl.password", "sasl_password", "token"])
def test_literal_secret_is_refused_and_not_repeated(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_secrets({name: "hunter2"})
    assert caught.value.code == "LITERAL_SECRET"
    assert "hunter2" not in caught.value.render()


def test_reference_and_other_options_pass() -> None:
    check_secrets({"password": "${PGPASSWORD}", "ssl.password": "${file:/run/secret}", "hostname": "db"})
