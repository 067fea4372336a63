"""Settings of Spark that a user may give (`--spark-conf name=value`, `spark_conf=`), and those that none may change.

Some decide what rows are, some whether they are all there, some who may reach them: these the engine sets itself. No
setting may hold a secret: Spark shows its configuration in many places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from headwater.errors import UsageError

VARIABLE: Final = "HEADWATER_SPARK_CONF"
_TYPES: Final = "values would be other ones than those that were stored"
_LOSS: Final = "rows could be missing without a word"
_TASKS: Final = "the engine's tasks run in workers that it prepares itself"
_DOOR: Final = "every port of Spark asks for a secret; docs/spark.md has how a cluster is given one"
_OPEN: Final = "the page of Spark asks nobody for a secret"
# By the beginning of the name.
REFUSED: Final[dict[str, str]] = {
    "spark.sql.session.timeZone": _TYPES,
    "spark.sql.ansi.": "an overflow or a wrong cast would become a NULL instead of an error",
    "spark.sql.storeAssignmentPolicy": _TYPES,
    "spark.sql.variable.substitute": "text that somebody stored would be changed",
    "spark.sql.legacy.": _TYPES,
    "spark.sql.parquet.": _TYPES,
    "spark.sql.caseSensitive": "columns would be other ones",
    "spark.sql.execution.arrow.": _TASKS,
    "spark.sql.files.ignore": _LOSS,
    "spark.files.ignore": _LOSS,
    "spark.speculation": "a file could be written twice",
    "spark.hadoop.mapreduce.fileoutputcommitter": _LOSS,
    "spark.hadoop.parquet.": _TYPES,
    "spark.python.daemon.module": _TASKS,
    "spark.python.worker.module": _TASKS,
    "spark.pyspark.python": _TASKS,
    "spark.executorEnv.LC_ALL": "names of files would not be UTF-8",
    "spark.sql.runSQLOnFiles": "a statement would read files of the machine",
    "spark.sql.catalogImplementation": "tables are the engine's own",
    "spark.scheduler.mode": "a large copy would hold up the live stream",
    "spark.scheduler.allocation.file": "a large copy would hold up the live stream",
    "spark.authenticate": _DOOR,
    "spark.network.crypto": _DOOR,
    "spark.network.sasl": _DOOR,
    "spark.io.encryption": _DOOR,
    "spark.ssl.": _DOOR,
    "spark.ui.enabled": _OPEN,
    "spark.plugins": _OPEN,
    "spark.master": "--master says it",
    "spark.submit.deployMode": "the engine is the driver",
    "spark.driver.extraJavaOptions": "HEADWATER_JAVA_OPTIONS adds to them",
}
_SECRET_WORDS: Final = ("password", "secret", "token", "access.key", "secret.key", "account.key", "credential")
_NO_SECRETS: Final = ("provider", "path", "file", "enabled")  # ends of names that only say where one is


def parse_settings(pairs: Iterable[str]) -> dict[str, str]:
    """`name=value` of a command line, checked."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(
                "OPTION_VALUE", "--spark-conf: write name=value", hint="--spark-conf spark.executor.memory=4g"
            )
        found[name.strip()] = value.strip()
    return checked_settings(found)


def checked_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """The same; UsageError for what is no setting of Spark's, or one that is not for users."""
    for name in settings:
        if not name.startswith("spark."):
            raise UsageError(
                "OPTION_VALUE",
                f"{name} is not a setting of Spark: their names begin with spark.",
                hint="--spark-conf spark.executor.memory=4g; --set takes system parameters",
            )
        reason = next((why for begin, why in REFUSED.items() if name.lower().startswith(begin.lower())), "")
        if not reason and _holds_secret(name):
            reason = "a configuration of Spark is shown in many places, and a secret must not be in it"
        if reason:
            raise UsageError("SPARK_SETTING_REFUSED", f"{name} cannot be set", detail=reason, hint=_hint(name))
    return dict(settings)


def _holds_secret(name: str) -> bool:
    lower = name.lower()
    return any(word in lower for word in _SECRET_WORDS) and not lower.endswith(_NO_SECRETS)


def _hint(name: str) -> str:
    if _holds_secret(name) and name.startswith("spark.hadoop."):
        return "name a credential store instead: spark.hadoop.hadoop.security.credential.provider.path"
    return "leave it out"
