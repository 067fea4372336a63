"""Python functions for queries and views: loaded from a file or a module, registered with an engine's sessions."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.errors import ParseException
from pyspark.sql import SparkSession

from headwater.errors import UsageError
from headwater.spark.session import sessions_beside


def load_function(target: str) -> Callable[..., Any]:
    """The function that `file.py:name` or `module:name` means."""
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        raise UsageError(
            "FUNCTION_NOT_FOUND", f"{target} does not name a function", hint="AS 'path/to/file.py:function'"
        )
    try:
        module = _file(place) if place.endswith(".py") else importlib.import_module(place)
        function = getattr(module, name)
    except Exception as error:
        raise UsageError(
            "FUNCTION_NOT_FOUND",
            f"the Python function {target} cannot be loaded",
            detail=type(error).__name__,
            hint="the file must be readable on the engine's machine, and the function defined in it",
        ) from error
    if not callable(function):
        raise UsageError("FUNCTION_NOT_FOUND", f"{target} is no function")
    found: Callable[..., Any] = function
    return found


def _file(path: str) -> Any:
    """A file as a module that Python does not know by name: so its functions travel to the workers by value."""
    spec = importlib.util.spec_from_file_location(f"headwater_file_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def register(spark: SparkSession, name: str, function: Callable[..., Any], returns: str) -> None:
    """Make a function known to a session and to those beside it, present and future."""
    functions = _registered.setdefault(spark, {})
    functions[name.lower()] = (name, function, returns)
    for session in (spark, *sessions_beside(spark, _prepare)):
        _register(session, name, function, returns)


def registered(spark: SparkSession) -> frozenset[str]:
    """The names of the functions that a session knows from us, in lower case."""
    return frozenset(_registered.get(spark, ()))


def _prepare(spark: SparkSession, quick: SparkSession) -> None:
    for name, function, returns in _registered.get(spark, {}).values():
        _register(quick, name, function, returns)


def _register(session: SparkSession, name: str, function: Callable[..., Any], returns: str) -> None:
    try:
        session.udf.register(name, function, returns)
    except ParseException as error:
        raise UsageError("TYPE_UNKNOWN", f"{returns} is not a type", hint="RETURNS STRING, BIGINT, DOUBLE …") from error


_registered: dict[SparkSession, dict[str, tuple[str, Callable[..., Any], str]]] = {}
