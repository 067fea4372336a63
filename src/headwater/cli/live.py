"""Progress on stderr: a live table of jobs in a terminal, plain lines elsewhere."""

from __future__ import annotations

import datetime as dt
import logging
import sys
from typing import Any, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from headwater.cli.visible import visible

RECENT_S: Final = 60.0  # an error that comes again is tried again at most half a minute later
RECENT_SHOWN: Final = 3


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def status_table(status: dict[str, Any]) -> Table:
    """All jobs with phase, progress, rate, ETA and what they wait for."""
    title = f"epoch {status['committed_epoch']}" + ("  (paused)" if status["engine"]["paused"] else "")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("job", "kind", "state", "phase", "progress", "rows", "rows/s", "eta", "waiting for"):
        table.add_column(name, justify="right" if name in ("rows", "rows/s", "eta") else "left")
    for job in status["jobs"]:
        # As texts, not as strings: Rich would read what is in brackets.
        cells = (
            job["name"],
            job["kind"],
            job["state"],
            job["phase"],
            bar(job["percent"]) if job["state"] == "creating" else "",
            rows_text(job),
            f"{job['rows_per_s']:,.0f}" if job["rows_per_s"] else "",
            duration(job["eta_s"]) if job["eta_s"] else "",
            job["waiting_for"] or "",
        )
        table.add_row(*(Text(visible(cell)) for cell in cells))
    return table


def rows_text(job: dict[str, Any]) -> str:
    """What a table or view holds, also if that is nothing; of the others what they have moved."""
    rows, held = job["rows"], job["kind"] in ("table", "view") and job["state"] != "creating"
    return f"{rows:,}" if rows or (held and rows is not None) else ""


def bar(percent: float, width: int = 20) -> str:
    full = int(width * percent / 100)
    return f"{'█' * full}{'░' * (width - full)} {percent:.2f}%"


def error_line(error: dict[str, Any]) -> str:
    hint = f"; {error['hint']}" if error["hint"] else ""
    return visible(f"{error['at']} {error['name']}: [{error['code']}] {error['message']}{hint}")


def open_errors(status: dict[str, Any]) -> list[dict[str, Any]]:
    """What is not over: the newest of each job and code, oldest first."""
    newest = {(e["name"], e["code"]): e for e in status["errors"] if e.get("ended_at") is None}
    return sorted(newest.values(), key=lambda e: str(e["at"]))


def recent_errors(status: dict[str, Any], now: dt.datetime | None = None) -> list[dict[str, Any]]:
    """The newest of each job and code of the last minute, oldest first."""
    since = (now or dt.datetime.now(dt.UTC)) - dt.timedelta(seconds=RECENT_S)
    newest = {(e["name"], e["code"]): e for e in status["errors"] if dt.datetime.fromisoformat(e["at"]) >= since}
    return sorted(newest.values(), key=lambda e: str(e["at"]))[-RECENT_SHOWN:]


class Reporter:
    """Shows status again and again: in place in a terminal, a line per change otherwise, in the log if wanted."""

    def __init__(self, *, as_log: bool = False) -> None:
        self.as_log = as_log
        self.console = Console(stderr=True)
        self.live: Any = None
        self._lines: dict[str, str] = {}

    def __enter__(self) -> Reporter:
        if self.console.is_terminal and not self.as_log:
            from rich.live import Live

            self.live = Live(console=self.console, refresh_per_second=4)
            self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live is not None:
            self.live.__exit__(*error)

    def show(self, status: dict[str, Any]) -> None:
        if self.live is not None:
            errors = [Text(error_line(error), style="red") for error in open_errors(status)[-RECENT_SHOWN:]]
            self.live.update(Group(status_table(status), *errors))
            return
        for job in status["jobs"]:
            line = plain_line(job)
            if self._lines.get(job["name"]) != line:
                self._lines[job["name"]] = line
                self._say(line)
        for error in recent_errors(status):
            key = f"{error['name']} {error['code']}"  # said once, however often it is tried again
            if self._lines.get(key) != error["message"]:
                self._lines[key] = error["message"]
                self._say(error_line(error))

    def _say(self, line: str) -> None:
        if self.as_log:
            logging.getLogger("headwater.progress").info("%s", line)
        else:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


def plain_line(job: dict[str, Any]) -> str:
    parts = [f"{job['kind']} {job['name']}: {job['state']}"]
    if job["state"] == "creating":
        parts.append(f"{job['phase']} {job['percent']:.2f}% {job['done']}/{job['total']} {job['rows']:,} rows")
        if job["rows_per_s"]:
            parts.append(f"{job['rows_per_s']:,.0f} rows/s")
        if job["eta_s"]:
            parts.append(f"eta {duration(job['eta_s'])}")
    if job["waiting_for"]:
        parts.append(f"waiting for {job['waiting_for']}")
    return visible(", ".join(parts))
