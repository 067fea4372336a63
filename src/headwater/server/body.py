"""The body of POST /sql: an object of texts, numbers and constants, of which `statement` is ours.

It is read by hand, not by Python's decoder: that one holds the interpreter until its end (seconds, for some megabytes
of numbers), follows nesting as deep as a stranger likes, and makes objects of what nobody wants. Here a value that is
not a scalar is refused when it begins, numbers are passed over, and a long text is decoded in pieces.
"""

from __future__ import annotations

import json
import re
from typing import Final, NoReturn

from headwater.errors import UsageError

# Longer than statements that people write: an INSERT of more than a hundred thousand short rows. Every megabyte of it
# takes the parser seconds, and becomes a tree of half a million nodes which Python's collector goes through at once.
MAX_BODY_BYTES: Final = 4 << 20
MAX_NAMES: Final = 16
HINT: Final = 'send {"statement": "SELECT …"}'

_STEP: Final = 64 << 10  # characters decoded in one call
_SPACE: Final = re.compile(r"[ \t\r\n]*")
# Whole characters and whole escapes only, so that a window's end never cuts one.
_TEXT: Final = re.compile(r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_HIGH_SURROGATE: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
_OTHER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


def too_large(limit: int = MAX_BODY_BYTES) -> UsageError:
    return UsageError(
        "BODY_TOO_LARGE",
        f"a request may have at most {limit:,} bytes",
        hint="send several INSERT statements of fewer rows, or read the rows with Spark",
    )


def statement_of(body: bytes) -> str:
    """The statement; UsageError `BAD_REQUEST` for everything else. A long body belongs into a thread."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError:
        _refuse("the body is not UTF-8")
    found = _Reader(text).members().get("statement")
    if found is None or not found.strip():
        _refuse("the body has no statement")
    try:
        found.encode()
    except UnicodeEncodeError:
        _refuse("the statement has half of a surrogate pair")
    return found


def _refuse(what: str) -> NoReturn:
    raise UsageError("BAD_REQUEST", what, hint=HINT)


class _Reader:
    """One object; `members` gives those that are texts."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def members(self) -> dict[str, str]:
        found: dict[str, str] = {}
        self._expect("{")
        if self._next() == "}":
            self._at += 1
            return self._ended(found)
        for _ in range(MAX_NAMES):
            name = self._string()
            self._expect(":")
            self._member(found, name)
            if self._next() == "}":
                self._at += 1
                return self._ended(found)
            self._expect(",")
        _refuse(f"the body has more than {MAX_NAMES} names")

    def _member(self, found: dict[str, str], name: str) -> None:
        first = self._next()
        if first == '"':
            found[name] = self._string()
            return
        if first in ("{", "["):
            _refuse("the body holds an object or a list, and takes neither")
        match = _OTHER.match(self._text, self._at)
        if match is None:
            _refuse("the body is not JSON")
        self._at = match.end()
        found.pop(name, None)

    def _ended(self, found: dict[str, str]) -> dict[str, str]:
        if self._next():
            _refuse("the body is not JSON")
        return found

    def _next(self) -> str:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._text[self._at : self._at + 1]

    def _expect(self, sign: str) -> None:
        if self._next() != sign:
            _refuse("the body is not JSON")
        self._at += 1

    def _string(self) -> str:
        self._expect('"')
        parts = []
        while True:
            match = _TEXT.match(self._text, self._at, self._at + _STEP)
            part = match[0] if match else ""
            if len(part) > 6 and _HIGH_SURROGATE.search(part):  # its other half comes with the next part
                part = part[:-6]
            if not part:
                break
            parts.append(json.loads(f'"{part}"'))
            self._at += len(part)
        if self._text[self._at : self._at + 1] != '"':
            _refuse("the body is not JSON")
        self._at += 1
        return "".join(parts)
