"""Reads of small tables one after the other in one Spark task; `backfill.py` has the read itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headwater.spark.tasks import run_guarded


@dataclass(frozen=True, slots=True)
class InTurn:
    """Each read fails for itself; but a source that one could not reach is not tried by those after it.

    (A host that swallows packets takes its `connect.timeout` each time.)
    """

    reads: tuple[Any, ...]

    @property
    def subject(self) -> int:
        return int(self.reads[0].subject)

    def run(self) -> Iterator[dict[str, Any]]:
        unreachable: dict[tuple[str, int], dict[str, Any]] = {}
        for read in self.reads:
            server = (read.config.hostname, read.config.port)
            if server in unreachable:
                yield {**unreachable[server], "subject": read.subject}
                continue
            for result in run_guarded(read):
                if result.get("transient") and result["error"]["code"] == "SOURCE_UNREACHABLE":
                    unreachable[server] = result
                yield result
