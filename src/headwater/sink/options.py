"""The options of `CREATE SINK … WITH (…)`: names, defaults, and the refusal of what is not known.

Each connector lists its own options as `Option`s; the ones that every sink has are here. Secrets stay references
(`${NAME}`, `${file:path}`) until the moment of use: `Secret.reveal` calls the resolver that the engine gives, also
inside a Spark task, so no plan, log or error ever holds one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headwater.config import is_reference, is_secret, literal_inside, reveal
from headwater.errors import UsageError
from headwater.sink.sink import SinkType

SecretResolver = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name, how its text is read, and its default (`required` ones have none)."""

    name: str
    kind: type = str
    default: Any = None
    required: bool = False
    secret: bool = False
    choices: tuple[str, ...] = ()
    url: bool = False  # a reference may be a part of it; `SinkOptions.reveal` resolves it


COMMON: Final = (
    Option("connector", required=True),
    Option("type", default=SinkType.UPSERT.value, choices=tuple(SinkType)),
    Option("primary_key"),
    Option("snapshot", bool, default=True),
    Option("force_append_only", bool, default=False),
    Option("sink.rate_limit", int),  # rows/s; none = unlimited, 0 = pause
    Option("sink.batch_max_rows", int, default=1_000_000),  # soft: a batch holds whole epochs
    Option("sink.batch_max_epochs", int, default=1_000),
    Option("sink.interval_s", int, default=0),  # at least this long from one batch to the next: fewer, larger commits
    Option("dead_letters", bool, default=False),  # refused rows go to files, and the sink goes on
    Option("dead_letters.path"),  # the engine gives a folder of its data directory where none is named
)
_NAME: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|`((?:[^`]|``)+)`|([^,]*))\s*(?:,|$)')
_TRUE: Final = frozenset({"true", "t", "1", "yes", "on"})
_FALSE: Final = frozenset({"false", "f", "0", "no", "off"})


@dataclass(frozen=True, slots=True)
class Secret:
    """A reference to a secret; its text is safe to show, its value exists only where `reveal` is called."""

    reference: str
    resolve: SecretResolver

    def reveal(self) -> str:
        return reveal(self.reference, self.resolve)

    def __repr__(self) -> str:
        return f"Secret({self.reference})"


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Checked options of one sink. `values` has every known option, `properties` what is passed on to a client
    library.
    """

    connector: str
    type: SinkType
    primary_key: tuple[str, ...]
    snapshot: bool
    force_append_only: bool
    rate_limit: int | None
    batch_max_rows: int
    batch_max_epochs: int
    interval_s: int
    dead_letters: bool
    values: Mapping[str, Any]
    properties: Mapping[str, str | Secret]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def text(self, name: str) -> str:
        return str(self.values[name])

    def reveal(self, name: str) -> str | None:
        """The value of a secret option or of a URL, resolved now; None if it was not given."""
        value = self.values[name]
        return value.reveal() if isinstance(value, Secret) else value

    def reveal_properties(self) -> dict[str, str]:
        """What is passed on to a client library, secrets resolved now."""
        return {n: v.reveal() if isinstance(v, Secret) else v for n, v in self.properties.items()}


def connector_of(raw: Mapping[str, str]) -> str:
    """The connector's name, before its options are known."""
    try:
        return raw["connector"].strip().lower()
    except KeyError:
        raise UsageError(
            "SINK_OPTION_MISSING", "option connector is missing", hint="WITH (connector='postgres', …)"
        ) from None


def parse_options(
    raw: Mapping[str, str],
    options: Sequence[Option],
    *,
    resolve_secret: SecretResolver,
    property_prefix: str = "",
) -> SinkOptions:
    """Check `raw` against the common and the connector's options. With a prefix, `prefix…` options are passed on."""
    known = {o.name: o for o in (*COMMON, *options)}
    values: dict[str, Any] = {o.name: o.default for o in known.values()}
    properties: dict[str, str | Secret] = {}
    for name, text in raw.items():
        if name in known:
            values[name] = _read(known[name], str(text), resolve_secret)
        elif property_prefix and name.startswith(property_prefix):
            properties[name[len(property_prefix) :]] = _property(name, str(text), resolve_secret)
        else:
            raise _unknown(name, known)
    for option in known.values():
        if option.required and values[option.name] in (None, ""):
            raise UsageError("SINK_OPTION_MISSING", f"option {option.name} is missing")
    return _collect(values, properties)


def _collect(values: Mapping[str, Any], properties: Mapping[str, str | Secret]) -> SinkOptions:
    kind = SinkType(values["type"])
    if values["force_append_only"] and kind is not SinkType.APPEND_ONLY:
        raise UsageError(
            "SINK_OPTION_INVALID", "force_append_only needs an append-only sink", hint="add type='append-only'"
        )
    rate = values["sink.rate_limit"]
    return SinkOptions(
        connector=str(values["connector"]).lower(),
        type=kind,
        primary_key=_names(values["primary_key"] or ""),
        snapshot=values["snapshot"],
        force_append_only=values["force_append_only"],
        rate_limit=None if rate is None or rate < 0 else rate,
        batch_max_rows=max(1, values["sink.batch_max_rows"]),
        batch_max_epochs=max(1, values["sink.batch_max_epochs"]),
        interval_s=max(0, values["sink.interval_s"]),
        dead_letters=values["dead_letters"],
        values=dict(values),
        properties=dict(properties),
    )


def _names(text: str) -> tuple[str, ...]:
    """Names between commas; one in double quotes or backquotes may hold commas and spaces, and its quote doubled."""
    found = []
    for double, back, plain in _NAME.findall(text):
        name = double.replace('""', '"') or back.replace("``", "`") or plain.strip()
        found += [name] if name else []
    return tuple(found)


def _read(option: Option, text: str, resolve: SecretResolver) -> Any:
    if option.secret:
        return _secret(option, text, resolve)
    if literal_inside(option.name, text):
        raise _literal(option.name)
    if option.url and is_reference(text):
        return Secret(text, resolve)
    if "://" in text and is_reference(text):
        hint = "options of its own take them: see docs/sinks.md"
        raise UsageError("SINK_OPTION_INVALID", f"option {option.name} takes no credentials", hint=hint)
    if option.choices and text.lower() not in option.choices:
        raise _invalid(option, f"one of {', '.join(option.choices)}")
    if option.kind is bool:
        if text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        raise _invalid(option, "true or false")
    if option.kind is int:
        try:
            return int(text)
        except ValueError:
            raise _invalid(option, "a whole number") from None
    return text.lower() if option.choices else text


def _secret(option: Option, text: str, resolve: SecretResolver) -> Secret | None:
    if not text:
        return None
    if "://" in text or not is_reference(text):
        raise _literal(option.name)
    return Secret(text, resolve)


def _literal(name: str) -> UsageError:
    return UsageError(
        "SECRET_LITERAL",
        f"option {name} holds a secret in clear text",
        hint=f"put it into the environment and write {name}='${{NAME}}', or '${{file:path}}' (also inside of URLs)",
    )


def _property(name: str, text: str, resolve: SecretResolver) -> str | Secret:
    if is_secret(name, text):
        return _secret(Option(name, secret=True), text, resolve) or text
    if literal_inside(name, text):
        raise _literal(name)
    return Secret(text, resolve) if is_reference(text) else text


def _invalid(option: Option, wanted: str) -> UsageError:
    return UsageError("SINK_OPTION_INVALID", f"option {option.name} must be {wanted}")


def _unknown(name: str, known: Mapping[str, Option]) -> UsageError:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"known options: {', '.join(sorted(known))}"
    return UsageError("SINK_OPTION_UNKNOWN", f"unknown option {name}", hint=hint)
