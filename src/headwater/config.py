"""System parameters with their limits, and secrets by reference. No I/O but reading a secret where it is used."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, quote_plus

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
# Names of options whose value is a secret: words anywhere, words between `.`, `_` and `-`, whatever ends in `key`.
_SECRET_NAME: Final = re.compile(
    r"passw|passphrase|secret|token|credential|connection[._-]?string|oauthbearer[._-]config"
    r"|(?:private|account|access|api|shared|signing|encryption)[._-]?key"
    r"|(?:^|[._-])(?:pwd|pem|sas|jaas|sig|signature)(?:$|[._-])|key$",
    re.IGNORECASE,
)
# … and names like those of things that are no secrets: where one is kept, when it ends, which one it is.
_NO_SECRET_NAME: Final = re.compile(
    r"primary_key|ssl\.key|.*public[._-]?key|.*key[._-]id|.*application_credentials|.*[._-](?:location|path|files?|ur[li]"
    r"|endpoint|type|mechanisms?|method|expires[._-]at(?:[._-]ms)?|ms|enabled?|scope|class|provider)",
    re.IGNORECASE,
)
_AUTHORITY: Final = re.compile(r"://(?=([^/?#\s]*)([^\s,]*))")  # looked at, not eaten: there may be several URLs
_PAIR: Final = re.compile(r"(?:^|[?&;,\s])([A-Za-z][\w.-]*)\s*=\s*['\"]?([^&;,\s'\"]+)")
_HAS_PAIRS: Final = re.compile(r"ur[li]|dsn|conninfo|config|string", re.IGNORECASE)
_REF: Final = "\0"  # stands for a reference while a value is looked at; no option can hold it
SHORT_SECRET: Final = 4  # characters; masking shorter ones would tear words apart and hide nothing
_revealed: set[str] = set()  # what was resolved in this process: a handful, as many as there are references


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
                    return _remembered(file.read().rstrip("\r\n"))
            except OSError as error:
                raise UsageError(
                    "SECRET_MISSING", f"the secret file {name} cannot be read", hint=str(error.strerror)
                ) from None
        if name not in os.environ:
            raise UsageError(
                "SECRET_MISSING", f"the environment variable {name} is not set", hint=f"export {name}=… and try again"
            )
        return _remembered(os.environ[name])

    return _REFERENCE.sub(one, text)


def reveal(text: str, resolve: Callable[[str], str] = resolve_secret) -> str:
    """What a value with references stands for, as it is used: in a URL a secret may hold any character."""
    if "://" not in text or _REFERENCE.fullmatch(text):
        return resolve(text)
    return _REFERENCE.sub(lambda found: quote(resolve(found[0]), safe=""), text)


def _remembered(secret: str) -> str:
    if len(secret) >= SHORT_SECRET:
        _revealed.add(secret)
    return secret


def masked(text: str) -> str:
    """A text of a library's own without the secrets that this process has resolved, in their URL spelling too."""
    for secret in sorted(_revealed, key=len, reverse=True):
        for spelling in (secret, quote(secret, safe=""), quote_plus(secret)):
            text = text.replace(spelling, "***")
    return text


def is_reference(text: str) -> bool:
    """Whether a value stands for a secret: `${NAME}` or `${file:path}`, or a URL that has one in it."""
    return _REFERENCE.fullmatch(text) is not None or ("://" in text and _REFERENCE.search(text) is not None)


def is_secret_name(name: str) -> bool:
    """Whether the value of an option of this name is a secret."""
    return _SECRET_NAME.search(name) is not None and _NO_SECRET_NAME.fullmatch(name) is None


def is_secret(name: str, value: str) -> bool:
    """Whether an option holds a secret: a switch is none, whatever it is called (`skip_signature`)."""
    return bool(value) and value.lower() not in ("true", "false") and is_secret_name(name)


def check_secrets(options: Mapping[str, str]) -> None:
    """Refuse a literal secret, also inside of a URL: it would be stored and shown in clear."""
    for name, value in options.items():
        if is_secret(name, value) and not _REFERENCE.fullmatch(value):
            raise literal_secret(name)
        if literal_inside(name, value):
            raise UsageError(
                "LITERAL_SECRET",
                f"option {name} holds a secret in clear inside of its value",
                hint=f"put it into the environment and write {name}='…://user:${{NAME}}@host…'",
            )


def literal_secret(name: str) -> UsageError:
    return UsageError(
        "LITERAL_SECRET",
        f"option {name} holds a secret in clear",
        hint=f"put it into the environment and write {name}='${{NAME}}', or '${{file:path}}'",
    )


def literal_inside(name: str, value: str) -> bool:
    """Whether a value has a password in a URL, or a pair `password=…`, that is not a reference and nothing else."""
    text = _REFERENCE.sub(_REF, value)
    urls = list(_AUTHORITY.finditer(text))
    if any(_password(found[1], found[2]) not in ("", _REF) for found in urls):
        return True
    if not urls and not _HAS_PAIRS.search(name):
        return False
    return any(is_secret_name(found[1]) and found[2] != _REF for found in _PAIR.finditer(text))


def _password(authority: str, rest: str) -> str:
    """The password of `user:password@host`; one with an unescaped `/`, `?` or `#` too, which no URL may have."""
    login, at, _ = authority.rpartition("@")
    if at:
        return login.partition(":")[2]
    port = authority.rpartition("]")[2].partition(":")[2]
    return port if "@" in rest and not port.isdecimal() else ""
