"""The error tree: what went wrong, with a stable code, a detail and a hint that a person can type.

    HeadwaterError
    ├── DefiniteError        retrying cannot help: bad input, dropped table, unsupported type
    │   ├── UsageError       wrong SQL, unknown option, missing object (exit code 2 on the command line)
    │   └── SourceError      the source said no, or its log is gone
    ├── TransientError       lost connection, busy server: retried with back-off
    └── IndeterminateError   a commit whose outcome is not known: read back before anything else happens

Every instance is picklable (Spark workers raise them) and never holds a row's value or a secret. The list of all codes
is `codes.py`; docs/errors.md is generated from it.
"""

from __future__ import annotations

import errno
import traceback
from pathlib import PurePath
from typing import Any


class HeadwaterError(Exception):
    """The base of every error that a user may see."""

    def __init__(self, code: str, message: str, *, detail: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail
        self.hint = hint

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.code, self.message, self.detail, self.hint))

    def render(self) -> str:
        """The text for a terminal: `error: [CODE] what happened`, then detail and hint."""
        lines = [f"error: {self}"]
        if self.detail:
            lines.append(f"  detail: {self.detail}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message, "detail": self.detail, "hint": self.hint}


def _rebuild(cls: type[HeadwaterError], code: str, message: str, detail: str, hint: str) -> HeadwaterError:
    return cls(code, message, detail=detail, hint=hint)


class DefiniteError(HeadwaterError):
    """Retrying cannot help; one table, view or sink stops and says so."""


class UsageError(DefiniteError):
    """The statement, option or configuration is wrong; nothing was changed."""


class SourceError(DefiniteError):
    """The source refuses, or what we need of it is gone."""


class TransientError(HeadwaterError):
    """A lost connection or a busy server; retried with back-off."""


class IndeterminateError(HeadwaterError):
    """A commit may or may not have landed; the caller reads it back by its stable id."""


def disk_full() -> TransientError:
    """ENOSPC, wherever it was met: what is committed stays, and work goes on when there is room."""
    return TransientError("DISK_FULL", "the disk is full", hint="free some space; nothing was lost")


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of Python or Arrow says that the disk, or the user's quota of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def place_of(error: BaseException) -> str:
    """`KeyError at lower.py:131`: where an unforeseen error came from. Without its text: that may hold data."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "headwater" in PurePath(f.filename).parts] or frames
    kind = type(error).__name__
    return f"{kind} at {PurePath(ours[-1].filename).name}:{ours[-1].lineno}" if ours else kind
