"""System parameters with their limits, and secrets by reference. No I/O but reading a secret where it is used."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from headwater.errors import UsageError


@dataclass(frozen=True, slots=True)
class Parameter:
    """One system parameter: its default, its limits, and whether it can change after the data directory was made."""

    name: str
    default: int
    low: int
    high: int
    about: str
    fixed: bool = False


PARAMETERS: Final[dict[str, Parameter]] = {
    p.name: p
    for p in (
        Parameter("barrier_interval_ms", 1000, 10, 600_000, "time between two barriers"),
        Parameter("checkpoint_frequency", 1, 1, 1000, "every how many barriers one is a checkpoint"),
        Parameter("retention_s", 3600, 0, 10 * 365 * 86_400, "how long past epochs stay readable"),
        Parameter("statement_timeout_s", 0, 0, 30 * 86_400, "how long a query may run; 0: as long as it takes"),
        Parameter("vnode_count", 256, 2, 32_768, "vnodes of every table; fixed at creation", fixed=True),
    )
}

# What spark-submit takes; anything else it refuses with a Java stack trace.
_MASTER: Final = re.compile(
    r"local(\[(\*|\d+)(\s*,\s*\d+)?\])?|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]|(spark|k8s)://.+|yarn"
)
_REFERENCE: Final = re.compile(r"\$\{(file:)?([^}]+)\}")
SECRET_OPTIONS: Final = ("password", "secret", "token", "passphrase", "sasl.jaas.config", "credentials", "access.key")


def parse_parameter(name: str, value: str) -> int:
    """The value of a system parameter; UsageError if there is none of that name or the value is out of bounds."""
    parameter = PARAMETERS.get(name)
    if parameter is None:
        raise UsageError("UNKNOWN_PARAMETER", f"there is no system parameter {name}", hint=suggestion(name, PARAMETERS))
    try:
        number = int(value)
    except ValueError:
        number = parameter.low - 1
    if not parameter.low <= number <= parameter.high:
        raise UsageError(
            "PARAMETER_RANGE",
            f"{name} takes a whole number from {parameter.low} to {parameter.high}",
            hint=f"the default is {parameter.default}",
        )
    return number


def check_master(master: str) -> None:
    """Refuses what Spark does not know as a master, before anything is made."""
    if not _MASTER.fullmatch(master):
        raise UsageError(
            "OPTION_VALUE",
            f"{master} is not a master of Spark",
            hint="--master local[*], spark://host:port, yarn or k8s://…",
        )


def suggestion(word: str, known: Iterable[str]) -> str:
    """`did you mean …?`, or the list of what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names) or 'none'}"


def resolve_secret(text: str) -> str:
    """Replace `${ENV}` and `${file:path}` by what they stand for; called where the value is used, never before."""

    def one(match: re.Match[str]) -> str:
        is_file, name = match[1], match[2]
        if is_file:
            try:
                with open(name, encoding="utf-8") as file:
                    return file.read().rstrip("\r\n")
            except OSError as error:
                raise UsageError(
                    "SECRET_MISSING", f"the secret file {name} cannot be read", hint=str(error.strerror)
                ) from None
        if name not in os.environ:
            raise UsageError(
                "SECRET_MISSING", f"the environment variable {name} is not set", hint=f"export {name}=… and try again"
            )
        return os.environ[name]

    return _REFERENCE.sub(one, text)


def check_secrets(options: Mapping[str, str]) -> None:
    """Refuse a literal secret: it would be stored and shown in clear."""
    for name, value in options.items():
        secret = any(name == word or name.endswith(("." + word, "_" + word)) for word in SECRET_OPTIONS)
        if secret and value and not _REFERENCE.fullmatch(value):
            raise UsageError(
                "LITERAL_SECRET",
                f"option {name} holds a secret in clear",
                hint=f"put it into the environment and write {name}='${{NAME}}', or '${{file:path}}'",
            )
