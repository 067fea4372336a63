"""`print`, `blackhole` and `python`: sinks without a target of their own.

A terminal cannot take part in a commit, so `print` shows a batch at its commit and a crash in that moment may show it
twice; `blackhole` reads every row and keeps nothing. Both remember progress only in memory. `python` loads a class of
the user's (`class='module:Class'`), which must keep the contract of `sink/sink.py`; `headwater.testing.check_sink`
tells whether it does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from headwater.errors import UsageError
from headwater.model.schema import OP, Column
from headwater.sink.base import BaseSink
from headwater.sink.options import Option, SinkOptions
from headwater.sink.sink import Progress, Sink, SinkTraits, Token, Verdict, judge_progress

OPTIONS: Final = (
    Option("class"),
    Option("print.max_rows", int, default=1_000),
)
PROPERTY_PREFIX: Final = "python."


class BlackholeSink(BaseSink):
    """Reads every row and keeps nothing; for measuring everything before the target."""

    takes_rows = True
    durable = False  # progress is in memory: a new object knows nothing of what the last one delivered

    def __init__(
        self, name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int
    ) -> None:
        super().__init__(name, options, columns, key, generation)
        self._progress = Progress(None, generation)

    def validate(self, columns: Sequence[Column], key: Sequence[str]) -> None:
        """Anything fits."""

    def claim(self) -> None:
        """There is nothing to own."""

    def prepare(self, from_epoch: int, to_epoch: int) -> Token:
        return self.token(from_epoch, to_epoch)

    def write(self, token: Token, batch: Any) -> Token:
        from headwater.spark.sink import TaskInfo, run_tasks

        def count(batches: Iterator[Any], info: TaskInfo) -> dict[str, int]:
            rows = size = 0
            for batch in batches:
                rows, size = rows + batch.num_rows, size + batch.nbytes
            return {"rows": rows, "bytes": size}

        results = run_tasks(batch, count)
        return token.written(rows=self.rows_of(results), bytes=sum(r["bytes"] for r in results))

    def commit(self, token: Token) -> None:
        if judge_progress(self._progress, token) is Verdict.APPLY:
            self._publish(token)
            self._progress = Progress(token.to_epoch, token.generation)

    def last_committed(self) -> int | None:
        return self._progress.epoch

    def reset(self, to_epoch: int | None) -> None:
        self._progress = Progress(to_epoch, self.generation)

    def abort(self, token: Token) -> None:
        """Nothing was staged."""

    def _publish(self, token: Token) -> None:
        """Nothing is kept."""


class PrintSink(BlackholeSink):
    """Prints each batch as JSON lines: `{"op":"upsert","row":{…}}`, at most `print.max_rows` of a batch."""

    def __init__(
        self, name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int
    ) -> None:
        super().__init__(name, options, columns, key, generation)
        self._staged: dict[str, list[str]] = {}

    def write(self, token: Token, batch: Any) -> Token:
        from headwater.sink.encode import json_rows
        from headwater.spark.sink import TaskInfo, run_tasks

        limit, names = int(self.options["print.max_rows"]), list(self.column_names)

        def encode(batches: Iterator[Any], info: TaskInfo) -> dict[str, Any]:
            lines: list[str] = []
            rows = 0
            for batch in batches:
                rows += batch.num_rows
                head = batch.slice(0, max(0, limit - len(lines)))
                ops = head.column(OP).to_pylist()
                lines += [_line(o, r) for o, r in zip(ops, json_rows(head, names).to_pylist(), strict=True)]
            return {"rows": rows, "lines": lines}

        results = run_tasks(batch, encode)
        self._staged = {token.attempt: [line for r in results for line in r["lines"]][:limit]}
        return token.written(rows=self.rows_of(results))

    def abort(self, token: Token) -> None:
        self._staged.pop(token.attempt, None)

    def _publish(self, token: Token) -> None:
        lines = self._staged.pop(token.attempt, [])
        for line in lines:
            print(line, flush=True)
        if token.rows > len(lines):
            print(f"({token.rows - len(lines)} more rows of sink {self.name} not shown)", file=sys.stderr)


def _line(op: int, row: str) -> str:
    return f'{{"op":"{"upsert" if op == 1 else "delete"}","row":{row}}}'


def PythonSink(name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int) -> Sink:
    """An instance of the user's class, made as `Class(name, options, columns, key, generation)`."""
    path = options["class"]
    if not path or ":" not in path:
        raise UsageError("SINK_OPTION_MISSING", "option class is missing", hint="class='package.module:Class'")
    module_name, _, class_name = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            "SINK_CLASS_NOT_FOUND", f"no class {class_name} in module {module_name}", detail=type(error).__name__
        ) from error
    sink = cls(name, options, columns, key, generation)
    missing = [m for m in _METHODS if not callable(getattr(sink, m, None))]
    if missing:
        raise UsageError("SINK_CLASS_INCOMPLETE", f"class {class_name} lacks {', '.join(missing)}")
    for name in _TRAITS:  # of a class that does not derive from SinkTraits
        if not hasattr(sink, name):
            setattr(sink, name, getattr(SinkTraits(), name))
    checked: Sink = sink
    return checked


_TRAITS: Final = ("durable", "rewindable", "takes_rows", "wants_vnodes", "unfinished", "landed")
_METHODS: Final = (
    *("validate", "claim", "prepare", "write", "commit"),
    *("last_committed", "reset", "abort", "close"),
)
