"""Who holds the lock of a file: living processes only, so that an error can name one that a person can look at.

Linux lists all locks in `/proc/locks`; elsewhere, or for a lock that another host holds, the answer is None.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOCKS: Final = Path("/proc/locks")


@dataclass(frozen=True, slots=True)
class Holder:
    """A process, with its name where it is on this host."""

    pid: int
    name: str = ""
    host: str = ""
    stopped: bool = False

    def __str__(self) -> str:
        text = f"process {self.pid}" + (f" ({self.name})" if self.name else "")
        text += f" on host {self.host}" if self.host else ""
        return text + (", which is stopped (SIGSTOP)" if self.stopped else "")


def lock_holder(*paths: Path) -> Holder | None:
    """The process that holds a lock of one of the files, whichever kind; never the caller's own."""
    for pid in _pids(paths):
        if pid != os.getpid() and (found := living(pid)) is not None:
            return found
    return None


def living(pid: int) -> Holder | None:
    """The process of this number; None if it has ended, also if its parent has not taken notice of that yet."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass
    except (OSError, OverflowError):
        return None
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return Holder(pid)
    name = text[text.index("(") + 1 : text.rindex(")")]
    state = text[text.rindex(")") + 1 :].split()[0]
    return None if state in "ZX" else Holder(pid, name, stopped=state in "Tt")


def _pids(paths: tuple[Path, ...]) -> Iterator[int]:
    """`1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF`; a line of somebody who waits has `->` behind its number."""
    wanted = set()
    for path in paths:
        try:
            found = path.stat()
        except OSError:
            continue
        wanted.add((os.major(found.st_dev), os.minor(found.st_dev), found.st_ino))
    try:
        lines = LOCKS.read_text().splitlines() if wanted else []
    except OSError:
        return
    for line in lines:
        words = line.split()
        if "->" in words or len(words) < 6:
            continue
        major, minor, inode = words[5].split(":")
        if (int(major, 16), int(minor, 16), int(inode)) in wanted and int(words[4]) > 0:
            yield int(words[4])
