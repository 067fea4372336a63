from __future__ import annotations

import random
from itertools import islice

import pytest

from headwater.barrier.recovery import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    ROOT_SCORE,
    ActorFailure,
    backoff_s,
    root_cause,
    score,
)
from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError, SourceError, TransientError, UsageError


def test_what_is_more_likely_the_cause_scores_higher() -> None:
    order = [
        ConnectionResetError(),
        RuntimeError(),
        HeadwaterError("C", "m"),
        TransientError("C", "m"),
        IndeterminateError("C", "m"),
        DefiniteError("C", "m"),
    ]
    scores = [score(error) for error in order]
    assert scores == sorted(set(scores))
    assert score(TimeoutError()) == score(order[0]) < ROOT_SCORE <= score(order[2])
    assert score(UsageError("C", "m")) == score(SourceError("C", "m")) == score(order[-1])


def test_the_root_cause_is_the_first_of_the_highest_score() -> None:
    failures = [
        ActorFailure("consequence", 1, ConnectionResetError()),
        ActorFailure("cause", 2, DefiniteError("A", "m")),
        ActorFailure("other", 3, DefiniteError("B", "m")),
    ]
    assert root_cause(failures).actor == "cause"


@pytest.mark.parametrize("seed", range(20))
def test_back_off_grows_from_20_ms_to_5_s_with_jitter_and_never_ends(seed: int) -> None:
    delays = list(islice(backoff_s(random.Random(seed)), 200))
    assert BACKOFF_FIRST_S / 2 <= delays[0] <= BACKOFF_FIRST_S
    assert all(BACKOFF_FIRST_S / 2 <= d <= BACKOFF_MAX_S for d in delays)
    assert all(d >= BACKOFF_MAX_S / 2 for d in delays[5:])
    assert len(set(delays[5:])) > 100
