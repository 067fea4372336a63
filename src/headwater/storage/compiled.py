"""The decorator of functions over bytes and numbers that are compiled. Apart, as it loads numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile at the first call; keep the machine code beside the source or in NUMBA_CACHE_DIR, where possible.

    A function runs without the interpreter's lock, so that another thread reads while one packs.
    """
    return _made(function)


def inlined(function: F) -> F:
    """The same for a small one that is to become part of the loops that call it: a call with arrays takes 5 ns."""
    return _made(function, forceinline=True)


def _made(function: F, **options: bool) -> F:
    try:
        made: F = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # numba finds no writable place for its cache (a read-only installation)
        made = numba.njit(nogil=True, **options)(function)
    return made
