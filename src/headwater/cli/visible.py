"""Text from outside on a terminal or in a log: what would steer it is spelt out, everything else stays as it is.

Names, values and messages come from sources, targets and statements, and are shown to somebody else. Spelt out are
control characters (ESC begins the sequences that move the cursor, set the title or answer as if typed), C1 controls,
signs that turn the direction of writing around, line separators, and halves of characters
that cannot be printed at all.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

TEXT: Final = "\n\t"  # what a text of several lines is made of
_STEERING: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: Any, *, keep: str = "") -> str:
    """The text with `\\x1b` and the like for what steers a terminal; `keep` names those that are meant (`"\\n"`)."""
    return _STEERING.sub(lambda match: match[0] if match[0] in keep else _spelt(match[0]), str(text))


def _spelt(character: str) -> str:
    number = ord(character)
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    if short is not None:
        return short
    return f"\\x{number:02x}" if number <= 0xFF else f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"


class PlainFormatter(logging.Formatter):
    """One line a record, and a traceback below it, further in: no text of others can look like a record of ours."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = visible(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {visible(line)}" for line in super().formatException(ei).splitlines())
