"""Whether a process sees the engine's own data directory, and not a folder of the same name on another disk.

    shared/<id>         written by each engine as it starts, with the id inside; `DataDir.mark` is the id
    shared/<id>.<n>     the answer of one task to the question whether it sees that (`spark/shared.py`)

Every use of the data directory in a task looks for the first: one `stat`. A worker on a host that has not mounted the
directory, or has lost it, so never writes a file that only it can see.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path
from typing import Final

from headwater.errors import TransientError, disk_full, is_disk_full

FOLDER: Final = "shared"
KEPT_S: Final = 86_400.0  # marks of earlier engines
NOT_SHARED: Final = "DATA_DIRECTORY_NOT_SHARED"


def write_mark(root: Path) -> str:
    """A new mark in the directory of an engine that owns it."""
    folder, mark = root / FOLDER, uuid.uuid4().hex
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _remove_old(folder)
        _write(folder / mark, mark)
    except OSError as error:
        if is_disk_full(error):
            raise disk_full() from None
        raise
    return mark


def _remove_old(folder: Path) -> None:
    """An engine that was replaced while it froze is to learn that by its next commit, not by a missing mark."""
    for entry in os.scandir(folder):
        if entry.stat().st_mtime < time.time() - KEPT_S:
            Path(entry.path).unlink(missing_ok=True)


def require_mark(root: str, mark: str) -> None:
    """TransientError unless this process sees the mark: another host may, so that the work is tried again there."""
    try:
        os.stat(f"{root}/{FOLDER}/{mark}")
    except OSError as error:
        raise not_shared(socket.gethostname(), root, os.strerror(error.errno or 0).lower()) from None


def answer(root: str, mark: str, name: str) -> None:
    """Read what the engine wrote, and write what it reads; OSError or ValueError if that cannot be done."""
    folder = Path(root) / FOLDER
    if (folder / mark).read_text(encoding="utf-8") != mark:
        raise ValueError("another engine's mark")
    _write(folder / f"{mark}.{name}", mark)


def take_answer(root: Path, mark: str, name: str) -> bool:
    """Whether the engine sees a task's answer, which is removed."""
    file = root / FOLDER / f"{mark}.{name}"
    try:
        return file.read_text(encoding="utf-8") == mark
    except OSError:
        return False
    finally:
        file.unlink(missing_ok=True)


def not_shared(host: str, root: str, why: str) -> TransientError:
    return TransientError(
        NOT_SHARED,
        f"host {host} does not see the engine's data directory {root}",
        detail=why,
        hint="mount the same directory at the same path on all hosts of the cluster, writable for Spark's user",
    )


def _write(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
