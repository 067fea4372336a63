"""What keeps others away from Spark's own ports: every peer of the driver proves that it has a secret.

    local[…], yarn, k8s://   Spark makes a secret by itself, a new one for each application
    spark://                 master, workers and applications share one: `HEADWATER_SPARK_SECRET` names it here

The secret of a standalone cluster is given to the driver's JVM in the environment, where Spark looks before it looks at
its configuration: a configuration is shown in command lines, logs and plans. Spark wants the setting to be there
nevertheless, so it says where the secret is, and no more. Between machines everything is encrypted, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from headwater.config import resolve_secret
from headwater.errors import UsageError

VARIABLE: Final = "HEADWATER_SPARK_SECRET"
_SPARKS_VARIABLE: Final = "_SPARK_AUTH_SECRET"  # what Spark itself gives to executors
SHORTEST: Final = 16  # characters: whoever reaches a port may try as often as they like
ENCRYPTED: Final[dict[str, str]] = {
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.saslFallback": "false",
    "spark.io.encryption.enabled": "true",
}


def security_settings(master: str) -> dict[str, str]:
    """The part of Spark's configuration that is about this; it holds no secret."""
    settings = {"spark.authenticate": "true"}
    if not master.startswith("local"):
        settings |= ENCRYPTED
    if _is_standalone(master):
        settings["spark.authenticate.secret"] = f"in the environment, as {VARIABLE}"
    return settings


@contextmanager
def secret_for_spark(master: str) -> Iterator[None]:
    """The secret in the environment, for a JVM that is started meanwhile; UsageError if a cluster needs one."""
    given = os.environ.get(VARIABLE, "")
    if not given and not _is_standalone(master):
        yield
        return
    os.environ[_SPARKS_VARIABLE] = _checked(given, master)
    try:
        yield
    finally:
        del os.environ[_SPARKS_VARIABLE]


def check_secret(master: str) -> None:
    """UsageError if the secret is not to be had, before anything is made."""
    with secret_for_spark(master):
        pass


def _checked(given: str, master: str) -> str:
    if not given:
        raise UsageError(
            "SPARK_SECRET",
            f"{master} wants the secret that its master and workers were started with",
            hint=f"export {VARIABLE}='${{file:/path/of/the/secret}}', or the secret itself; docs/spark.md",
        )
    secret = resolve_secret(given)
    if len(secret) < SHORTEST:
        raise UsageError(
            "SPARK_SECRET",
            f"the secret of {VARIABLE} has fewer than {SHORTEST} characters",
            hint="openssl rand -hex 32",
        )
    return secret


def _is_standalone(master: str) -> bool:
    return master.startswith("spark://")
