"""What Spark is told about its secret, and what it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwater.errors import UsageError
from headwater.spark.security import VARIABLE, secret_for_spark, security_settings

SECRET = "0123456789abcdef0123"
CLUSTER = "spark://10.0.0.1:7077"


@pytest.mark.parametrize("master", ["local[*]", "local-cluster[1,1,1024]", "yarn", "k8s://https://host", CLUSTER])
def test_every_master_wants_a_secret(master: str) -> None:
    assert security_settings(master)["spark.authenticate"] == "true"


def test_between_machines_everything_is_encrypted() -> None:
    settings = security_settings(CLUSTER)
    assert settings["spark.network.crypto.enabled"] == settings["spark.io.encryption.enabled"] == "true"
    assert "spark.network.crypto.enabled" not in security_settings("local[2]")


def test_the_secret_is_in_no_setting_and_only_in_the_environment_of_the_jvm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text(SECRET + "\n")
    monkeypatch.setenv(VARIABLE, f"${{file:{tmp_path}/secret}}")
    with secret_for_spark(CLUSTER):
        assert os.environ["_SPARK_AUTH_SECRET"] == SECRET
        assert SECRET not in str(security_settings(CLUSTER))
    assert "_SPARK_AUTH_SECRET" not in os.environ


@pytest.mark.parametrize("given", ["", "short"])
def test_a_cluster_without_a_good_secret_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(UsageError, match="SPARK_SECRET") as caught, secret_for_spark(CLUSTER):
        pass
    assert not given or given not in caught.value.render()


def test_on_one_machine_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with secret_for_spark("local[2]"):
        assert "_SPARK_AUTH_SECRET" not in os.environ
