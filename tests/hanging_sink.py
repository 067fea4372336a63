"""A sink that never comes back from a step: in its own thread, or in all of Spark's tasks, or by trying again for ever.

CREATE SINK s FROM t WITH (connector='python', class='hanging_sink:HangingSink',
                           python.where='claim' | 'write' | 'tasks' | 'retry')
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from headwater.errors import TransientError
from headwater.sink.base import BaseSink
from headwater.sink.sink import Token
from headwater.spark.sink import numbered_tasks, run_tasks

FOREVER_S = 3600.0


class HangingSink(BaseSink):
    def _maybe(self, step: str) -> None:
        if self.options.properties["where"] == step:
            time.sleep(FOREVER_S)

    def validate(self, columns: Any, key: Any) -> None: ...

    def claim(self) -> None:
        self._maybe("claim")

    def prepare(self, from_epoch: int, to_epoch: int) -> Token:
        return self.token(from_epoch, to_epoch)

    def write(self, token: Token, batch: Any) -> Token:
        self._maybe("write")
        if self.options.properties["where"] == "retry":
            raise TransientError("SINK_UNREACHABLE", "it does not answer")
        run_tasks(numbered_tasks(8, like=batch), _hang, at_most=8)
        return token.written(rows=0)

    def commit(self, token: Token) -> None: ...

    def last_committed(self) -> int | None:
        return None

    def reset(self, to_epoch: int | None) -> None: ...

    def abort(self, token: Token) -> None: ...


def _hang(batches: Iterator[Any], info: Any) -> dict[str, Any]:
    time.sleep(FOREVER_S)
    return {"rows": 0}
