"""What the demo shows: steps with their time, and progress: bars in place in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from headwater.cli.live import bar, duration

LINE_EVERY_S: Final = 2.0  # without a terminal: one line per job and this time at the most


class Screen:
    """Use it as a context manager, so that the terminal is left in order."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._began = time.monotonic()
        self._live: Live | None = None
        self._lines: dict[str, str] = {}
        self._last = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.still()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def step(self, text: str) -> None:
        self.console.print(Text(f"[{self.seconds:6.1f} s] {text}"))

    def line(self, text: str = "") -> None:
        self.console.print(Text(text))

    def progress(self, status: dict[str, Any]) -> None:
        lines = {job["name"]: job_line(job) for job in status["jobs"] if job["kind"] != "source"}
        if self.console.is_terminal:
            if self._live is None:
                self._live = Live(console=self.console, refresh_per_second=4, transient=True)
                self._live.start()
            self._live.update(Text("\n".join(lines.values())))
            return
        if time.monotonic() - self._last < LINE_EVERY_S:
            return
        self._last = time.monotonic()
        for name, text in lines.items():
            if self._lines.get(name) != text:
                self._lines[name] = text
                self.step(text)

    def still(self) -> None:
        """Take the bars away; steps stay."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def job_line(job: dict[str, Any]) -> str:
    """`orders   ██████░░ 41.67%  125,000 rows  21,000 rows/s  eta 0:08  splits 5/12`."""
    parts = [f"{job['kind']:5} {job['name']:20}"]
    if job["state"] != "creating":
        parts.append(job["state"])
        return " ".join(parts)
    parts.append(f"{bar(job['percent'])}  {job['rows']:>9,} rows  {job['rows_per_s']:>7,.0f} rows/s ")
    parts.append(f"eta {duration(job['eta_s']) or '?'} ")
    parts.append(f"splits {job['done']}/{job['total']}" if job["kind"] == "table" else str(job["phase"]))
    if job["waiting_for"]:
        parts.append(f", waits for {job['waiting_for']}")
    return " ".join(parts)
