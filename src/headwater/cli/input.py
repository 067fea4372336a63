"""SQL text from a file or from stdin: always UTF-8, and an error that says so."""

from __future__ import annotations

import sys
from pathlib import Path

from headwater.errors import UsageError


def read_text(path: Path | None) -> str:
    """The text of a file, or of stdin."""
    name = "stdin" if path is None else str(path)
    try:
        return (sys.stdin.buffer.read() if path is None else path.read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            "FILE_UNREADABLE", f"{name} is not UTF-8", detail=f"at byte {error.start}", hint="write it in UTF-8"
        ) from None
    except OSError as error:
        raise UsageError("FILE_UNREADABLE", f"{name} cannot be read", detail=str(error.strerror)) from None
