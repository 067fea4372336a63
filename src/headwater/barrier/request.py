"""Requests: what must ride on a barrier and be committed with it, and what becomes of it when that barrier is lost.

`coordinator.py` sends them; here is only what decides and tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headwater.barrier.recovery import ActorFailure
from headwater.errors import DefiniteError, HeadwaterError, TransientError
from headwater.model.barrier import Mutation, MutationKind
from headwater.storage.checkpoint import Contribution

if TYPE_CHECKING:
    from headwater.barrier.coordinator import Actor

REQUEST_TRIES: Final = 3  # a request whose barrier was lost in a recovery is sent again, this often at most


@dataclass(slots=True)
class Request:
    """Something that must ride on a barrier and be committed with it."""

    done: asyncio.Future[int]
    mutation: Mutation | None = None
    contribution: Contribution | None = None
    new_actors: Callable[[], Sequence[Actor]] | None = None
    drop_actors: Sequence[str] = ()
    tries: int = 0
    epoch: int = 0  # with which it was last sent


def is_hopeless(request: Request, cause: ActorFailure) -> bool:
    """After a definite error of its own job, or too often. Pausing concerns everything, and is nobody's fault."""
    if request.tries >= REQUEST_TRIES:
        return True
    mutation = request.mutation
    if mutation is None or not isinstance(cause.error, DefiniteError):
        return False
    if mutation.kind in (MutationKind.PAUSE, MutationKind.RESUME):
        return False
    return cause.job_id in (0, mutation.job_id) or mutation.job_id == 0


def acknowledge(request: Request, epoch: int) -> None:
    if not request.done.done():
        request.done.set_result(epoch)


def fail(request: Request, error: BaseException) -> None:
    if request.done.done():
        return
    if not isinstance(error, HeadwaterError):
        error = TransientError("EPOCH_FAILED", f"the epoch failed: {type(error).__name__}", hint="see hw_errors")
    request.done.set_exception(error)
