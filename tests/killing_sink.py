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

import pyarrow as pa

from headwater.config import resolve_secret
from headwater.connectors.kafka.sink import send_task
from headwater.errors import TransientError
from headwater.model.schema import Column
from headwater.sink.batch import RowBatch
from headwater.sink.options import Secret, SinkOptions
from headwater.sink.registry import open_sink
from headwater.spark.sink import run_tasks

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


class PartlySendingSink:
    """A Kafka sink of several producers of which only some send their slice, by order of a file.

    The file holds `kill` or `fail`, and the numbers of the slices that are sent before the engine is killed or the
    connection seems to be lost. Beside it `producers` holds the number of producers, and `written` gets the rows of
    each batch that was staged.
    """

    def __init__(
        self, name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int
    ) -> None:
        given = {n: v.reference if isinstance(v, Secret) else v for n, v in options.properties.items()}
        self._order = Path(given.pop("order_file"))
        given |= {"type": options.type.value, "producers": self._order.with_name("producers").read_text()}
        self._inner: Any = open_sink(name, given, columns, key, generation, resolve_secret)
        self._send, self._inner._send = self._inner._send, self._send_some
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, token: Any, batch: Any) -> Any:
        written = self._inner.write(token, batch)
        with self._order.with_name("written").open("a") as file:
            file.write(f"{written.rows}\n")
        return written

    def _send_some(self, token: Any, slices: int) -> None:
        if not self._order.exists():
            self._send(token, slices)
            return
        how, *numbers = self._order.read_text().split()
        sending = send_task(self._inner.place, token, alone=False)
        run_tasks(RowBatch(pa.table({"id": pa.array([int(n) for n in numbers], pa.int64())})), sending, commits=True)
        if how == "kill":
            self._order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        raise TransientError("SINK_UNREACHABLE", "the connection is lost")
