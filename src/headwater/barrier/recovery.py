"""Recovery: which of several errors is the root cause, and how long to wait before the next try. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError, TransientError

# Further errors are awaited this long when the first looks like a consequence of another one.
ROOT_CAUSE_WINDOW_S: Final = 3.0
BACKOFF_FIRST_S: Final = 0.02
BACKOFF_MAX_S: Final = 5.0
BACKOFF_FACTOR: Final = 4.0
ROOT_SCORE: Final = 50


@dataclass(frozen=True, slots=True)
class ActorFailure:
    """An actor's error as the coordinator got it."""

    actor: str
    job_id: int
    error: BaseException


def score(error: BaseException) -> int:
    """How likely an error is the cause and not a consequence; at ROOT_SCORE it needs no company."""
    if isinstance(error, DefiniteError):
        return 100
    if isinstance(error, IndeterminateError):
        return 90
    if isinstance(error, TransientError):
        return 60
    if isinstance(error, HeadwaterError):
        return 55
    if isinstance(error, ConnectionError | TimeoutError):
        return 20
    return 40


def root_cause(failures: Sequence[ActorFailure]) -> ActorFailure:
    """The failure with the highest score; the first of equals."""
    return max(failures, key=lambda f: score(f.error))


def backoff_s(rng: random.Random) -> Iterator[float]:
    """20 ms, then up to 5 s, with jitter, for ever."""
    delay = BACKOFF_FIRST_S
    while True:
        yield delay * (0.5 + rng.random() / 2)
        delay = min(BACKOFF_MAX_S, delay * BACKOFF_FACTOR)
