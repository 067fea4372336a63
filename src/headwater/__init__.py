"""Headwater keeps tables, materialized views and sinks in step with live databases, on Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwater.errors import HeadwaterError

if TYPE_CHECKING:
    from headwater.api import Engine

__all__ = ["Engine", "HeadwaterError", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Late: every reader process and Spark worker imports this package, and none of them needs the engine.
    if name == "Engine":
        from headwater.api import Engine

        return Engine
    raise AttributeError(name)
