"""What the engine's log may hold: whole records, one a line, and no statement of a user's."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from headwater.cli.commands import PlainFormatter
from headwater.errors import UsageError
from headwater.sql.parser import parse


def record(message: str, **more: object) -> str:
    made = logging.LogRecord("headwater", logging.WARNING, "x.py", 1, message, (), None)
    for name, value in more.items():
        setattr(made, name, value)
    return PlainFormatter("%(levelname)s %(message)s").format(made)


def test_a_message_is_one_line_and_moves_no_cursor() -> None:
    assert record("a\n2026-11-18 ERROR forged\r\x1b[2Jü☃\u2028b\x00") == (
        "WARNING a\\n2026-11-18 ERROR forged\\r\\x1b[2Jü☃\\u2028b\\x00"
    )


def test_the_lines_of_a_traceback_are_further_in_than_records() -> None:
    try:
        raise ValueError("x\n2026-11-18 00:00:00 ERROR forged\x1b[31m")
    except ValueError:
        text = record("it failed", exc_info=sys.exc_info())
    first, *others = text.split("\n")
    assert first == "WARNING it failed"
    assert all(line.startswith("  ") for line in others)
    assert "\x1b" not in text


def test_statements_are_not_logged_by_the_parser() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        for text in ("CALL x('hunter2\nforged')", "VACUUM hunter2", "SELECT hunter2 FROM t TABLESAMPLE (5 x"):
            with pytest.raises(UsageError):
                list(parse(text))
    finally:
        logging.getLogger().removeHandler(handler)
    assert stream.getvalue() == ""
