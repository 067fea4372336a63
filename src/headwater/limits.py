"""How many files this process may have open: raised as far as it goes, and refused when that is too few.

An engine holds Spark's jars open (some 300), the spool, the meta store, segments and connections. Java fails with few
in ways that do not say why, so the number is looked at before anything is started.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final

from headwater.errors import UsageError

LEAST_OPEN_FILES: Final = 1_024  # a small pipeline runs with these
# More is not asked for: some programs, which the process may start, walk through all numbers that could be open.
WANTED_OPEN_FILES: Final = 65_536


def raise_open_files() -> int:
    """Raise the soft limit towards the hard one; gives what holds now. Processes started later inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = WANTED_OPEN_FILES if hard == unlimited else min(WANTED_OPEN_FILES, hard)
    if soft != unlimited and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems have a lower limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED_OPEN_FILES if soft == unlimited else soft


def require_open_files() -> None:
    """UsageError OPEN_FILES_LIMIT where an engine could not live."""
    limit = raise_open_files()
    if limit < LEAST_OPEN_FILES:
        raise UsageError(
            "OPEN_FILES_LIMIT",
            f"this process may have {limit} files open, and an engine needs at least {LEAST_OPEN_FILES}",
            detail="the hard limit of open files (ulimit -Hn) is that low",
            hint=f"ulimit -n {WANTED_OPEN_FILES}; in a systemd unit LimitNOFILE={WANTED_OPEN_FILES}",
        )
