"""What the terminal shows of a status."""

from __future__ import annotations

import datetime as dt

from headwater.cli.live import error_line, recent_errors

NOW = dt.datetime(2026, 11, 16, 12, 0, tzinfo=dt.UTC)


def error(seconds_ago: float, name: str, code: str) -> dict[str, str]:
    at = (NOW - dt.timedelta(seconds=seconds_ago)).isoformat()
    return {"at": at, "name": name, "code": code, "message": "the disk is full", "hint": "free some space"}


def test_only_the_newest_of_each_kind_of_the_last_minute_is_recent() -> None:
    errors = [error(90, "old", "A"), error(50, "main", "B"), error(20, "orders", "C"), error(10, "main", "B")]
    assert recent_errors({"errors": errors}, NOW) == [errors[2], errors[3]]


def test_an_error_says_what_to_do() -> None:
    assert error_line(error(0, "main", "DISK_FULL")).endswith("main: [DISK_FULL] the disk is full; free some space")
