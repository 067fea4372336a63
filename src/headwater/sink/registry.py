"""Connectors by name, loaded when a sink of that kind is opened, so that nobody needs the client libraries of the
others.

A connector module has `OPTIONS`, optionally `PROPERTY_PREFIX`, and a class made as `Class(name, options, columns, key,
generation)` that keeps the contract of `sink.py`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headwater.errors import UsageError
from headwater.model.schema import Column
from headwater.sink.options import SecretResolver, SinkOptions, connector_of, parse_options
from headwater.sink.sink import Sink, SinkType

CONNECTORS: Final[dict[str, str]] = {
    "postgres": "headwater.connectors.postgres.sink:PostgresSink",
    "mysql": "headwater.connectors.mysql.sink:MySqlSink",
    "mariadb": "headwater.connectors.mysql.sink:MySqlSink",
    "kafka": "headwater.connectors.kafka.sink:KafkaSink",
    "delta": "headwater.connectors.delta.sink:DeltaSink",
    "iceberg": "headwater.connectors.iceberg.sink:IcebergSink",
    "files": "headwater.connectors.files.sink:FilesSink",
    "print": "headwater.connectors.trial.sink:PrintSink",
    "blackhole": "headwater.connectors.trial.sink:BlackholeSink",
    "python": "headwater.connectors.trial.sink:PythonSink",
}

# Whose libraries are not installed with Headwater itself (pyproject.toml), and the extra that has them.
EXTRAS: Final[dict[str, str]] = {
    "mysql": "mysql",
    "mariadb": "mysql",
    "kafka": "kafka",
    "delta": "delta",
    "iceberg": "iceberg",
}


def sink_options(raw: Mapping[str, str], *, resolve_secret: SecretResolver) -> SinkOptions:
    """The checked options of a sink, without opening it (for `CREATE SINK` and `EXPLAIN`)."""
    module, _ = _load(connector_of(raw))
    prefix = getattr(module, "PROPERTY_PREFIX", "")
    return parse_options(raw, module.OPTIONS, resolve_secret=resolve_secret, property_prefix=prefix)


def sink_key(options: SinkOptions, columns: Sequence[Column], key: Sequence[str]) -> tuple[str, ...]:
    """The key of the sink: the option `primary_key`, else the visible key of the table; none for append-only."""
    names = {c.name for c in columns}
    if options.primary_key:
        for column in options.primary_key:
            if column not in names:
                close = difflib.get_close_matches(column, names, n=1)
                hint = f"did you mean {close[0]}?" if close else f"columns: {', '.join(sorted(names))}"
                raise UsageError("SINK_KEY_UNKNOWN", f"primary_key names no column {column}", hint=hint)
        return options.primary_key
    visible = tuple(k for k in key if k in names)
    if len(visible) == len(key) and visible:
        return visible
    if options.type is SinkType.APPEND_ONLY:
        return ()
    raise UsageError(
        "SINK_KEY_MISSING",
        "an upsert sink needs a key, and its input has no visible one",
        hint="add primary_key='column, …' or type='append-only'",
    )


def open_sink(
    name: str,
    options: Mapping[str, str],
    columns: Sequence[Column],
    key: Sequence[str],
    generation: int,
    resolve_secret: SecretResolver,
) -> Sink:
    """Open the sink `name`. `columns` are the visible columns of its input, `key` the input's key (hidden names
    allowed).
    """
    parsed = sink_options(options, resolve_secret=resolve_secret)
    _, connector = _load(parsed.connector)
    visible = tuple(c for c in columns if not c.hidden)
    sink: Sink = connector(name, parsed, visible, sink_key(parsed, visible, key), generation)
    return sink


def _load(connector: str) -> tuple[Any, Any]:
    try:
        path = CONNECTORS[connector]
    except KeyError:
        close = difflib.get_close_matches(connector, CONNECTORS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"connectors: {', '.join(CONNECTORS)}"
        raise UsageError("SINK_CONNECTOR_UNKNOWN", f"there is no sink connector {connector}", hint=hint) from None
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise library_missing(connector, error) from error
    return module, getattr(module, class_name)


def library_missing(connector: str, error: ImportError) -> UsageError:
    """What to say when a connector's library cannot be imported."""
    extra = EXTRAS.get(connector)
    return UsageError(
        "SINK_LIBRARY_MISSING",
        f"connector {connector} needs a library that is not installed",
        detail=str(error.name),
        hint=f"pip install 'headwater[{extra}]'" if extra else "",
    )
