"""What the demo shows and how it judges, without a server."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from headwater.demo.compare import Comparison
from headwater.demo.screen import Screen, job_line


def job(**changes: Any) -> dict[str, Any]:
    return {
        "name": "orders",
        "kind": "table",
        "state": "creating",
        "phase": "backfill",
        "percent": 41.67,
        "rows": 125_000,
        "rows_per_s": 21_000.0,
        "eta_s": 8.3,
        "done": 5,
        "total": 12,
        "waiting_for": None,
        **changes,
    }


def test_line_of_a_table_has_rows_rate_eta_and_splits() -> None:
    line = job_line(job())
    for part in ("orders", "41.67%", "125,000 rows", "21,000 rows/s", "eta 0:08", "splits 5/12"):
        assert part in line


def test_line_of_a_view_has_its_phase_and_what_it_waits_for() -> None:
    line = job_line(job(kind="view", phase="LogStore [lag 2.0 s]", eta_s=None, waiting_for="the rate limit is 0"))
    assert "LogStore [lag 2.0 s]" in line
    assert "eta ?" in line
    assert "waits for the rate limit is 0" in line


def test_finished_job_is_only_named() -> None:
    assert job_line(job(state="live")).split() == ["table", "orders", "live"]


def test_without_a_terminal_there_are_plain_lines_and_a_job_that_did_not_change_is_not_repeated() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, highlight=False, soft_wrap=True)) as screen:
        for _ in range(3):
            screen._last = 0.0
            screen.progress({"jobs": [job()]})
    assert out.getvalue().count("orders") == 1
    assert "\x1b" not in out.getvalue()


def test_comparison_is_of_the_whole_text() -> None:
    assert Comparison("view", "DE 2 50.49", "DE 2 50.49").equal
    assert not Comparison("view", "DE 2 50.49", "DE 2 50.48").equal
