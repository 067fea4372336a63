"""Settings of Spark that users give."""

from __future__ import annotations

import pytest

from headwater.errors import UsageError
from headwater.spark.options import checked_settings, parse_settings
from headwater.spark.security import security_settings
from headwater.spark.session import SETTINGS


def test_what_is_the_user_s_is_taken() -> None:
    given = ["spark.executor.memory=4g", "spark.cores.max = 8", "spark.hadoop.fs.s3a.endpoint=http://h:1/?a=b"]
    assert parse_settings(given) == {
        "spark.executor.memory": "4g",
        "spark.cores.max": "8",
        "spark.hadoop.fs.s3a.endpoint": "http://h:1/?a=b",
    }


@pytest.mark.parametrize(
    "name",
    [
        "spark.sql.variable.substitute", "spark.sql.ansi.enabled", "spark.sql.session.timeZone", "spark.authenticate",
        "spark.authenticate.secret", "spark.network.crypto.enabled", "spark.sql.files.ignoreMissingFiles",
        "spark.python.daemon.module", "spark.ui.enabled", "SPARK.SQL.ANSI.ENABLED".replace("SPARK", "spark"),
        *security_settings("spark://h:1"),
    ],
)  # fmt: skip
def test_what_the_engine_relies_on_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UsageError, match="SPARK_SETTING_REFUSED") as caught:
        checked_settings({name: "x"})
    assert caught.value.detail


def test_settings_of_the_engine_that_decide_on_rows_cannot_be_changed() -> None:
    harmless = (
        "spark.ui.",
        "spark.sql.codegen",
        "spark.sql.sources",
        "spark.sql.ui",
        "spark.python.worker.reuse",
        "spark.python.factory",
    )
    for name in SETTINGS:
        if not name.startswith(harmless):
            with pytest.raises(UsageError):
                checked_settings({name: "x"})


@pytest.mark.parametrize("name", ["spark.hadoop.fs.s3a.secret.key", "spark.my.password", "spark.hadoop.x.access.key"])
def test_no_setting_holds_a_secret(name: str) -> None:
    with pytest.raises(UsageError, match="SPARK_SETTING_REFUSED") as caught:
        checked_settings({name: "s3cret-value"})
    assert "s3cret" not in caught.value.render()
    assert checked_settings({"spark.hadoop.hadoop.security.credential.provider.path": "jceks://x"})


@pytest.mark.parametrize("pair", ["spark.executor.memory", "barrier_interval_ms=5"])
def test_what_is_no_setting_of_spark_is_wrong_use(pair: str) -> None:
    with pytest.raises(UsageError, match="OPTION_VALUE"):
        parse_settings([pair])
