"""A sink that ends its own engine with `kill -9` at a given step of delivery: any sink of the package, wrapped.

    CREATE SINK s FROM t WITH (connector='python', class='killing_sink:KillingSink', python.kill_file='/tmp/step',
                               python.connector='postgres', python.hostname=…)

The kill file holds a step ("before commit", "after write", …); it is taken away before the kill, so that the engine
dies once. Without the file the sink is the wrapped one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwater.config import resolve_secret
from headwater.model.schema import Column
from headwater.sink.options import Secret, SinkOptions
from headwater.sink.registry import open_sink

STEPS = ("prepare", "write", "commit")


class KillingSink:
    def __init__(
        self, name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int
    ) -> None:
        given = {n: v.reference if isinstance(v, Secret) else v for n, v in options.properties.items()}
        self._file = Path(given.pop("kill_file"))
        given["type"] = options.type.value
        self._inner: Any = open_sink(name, given, columns, key, generation, resolve_secret)
        self.name = name

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name not in STEPS:
            return method

        def step(*args: Any) -> Any:
            self._maybe(f"before {name}")
            result = method(*args)
            self._maybe(f"after {name}")
            return result

        return step

    def _maybe(self, step: str) -> None:
        if self._file.exists() and self._file.read_text() == step:
            self._file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
