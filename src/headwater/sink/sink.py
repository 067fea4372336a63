"""The contract of a sink: what a connector promises, so that every change is in its target exactly once (I5).

    prepare(from, to) ──► write(token, …) ──► commit(token) ──► durable
         makes room         one Spark job:        one atomic step:
         for staging        stages, shows         data + progress
                            nothing               become visible together

`delivery.py` calls these in order and decides what happens after a failure; `logstore/` decides what is delivered and
what may be forgotten; `spark/sink.py` makes the batch. A connector does only the above, with its target's own means.

Progress lives in the target: the last delivered epoch and the generation of the engine that owns the sink.
`judge_progress` is the one rule by which all sinks compare them with a token; a sink evaluates it inside its atomic
step.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from headwater.errors import DefiniteError, TransientError
from headwater.model.schema import Column


class SinkType(StrEnum):
    """What reaches the target: rows by key with deletes, or only ever new rows."""

    UPSERT = "upsert"
    APPEND_ONLY = "append-only"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a target says about a sink: the last epoch it holds (None: nothing yet) and who owns the sink."""

    epoch: int | None
    generation: int


@dataclass(frozen=True, slots=True)
class Token:
    """One attempt to deliver the changes of `(from_epoch, to_epoch]`.

    `attempt` is unique per `prepare`, so that what two attempts stage never mixes. `payload` belongs to the connector
    (file lists, task attempts); it is JSON, never rows and never secrets.
    """

    sink: str
    from_epoch: int
    to_epoch: int
    generation: int
    attempt: str = field(default_factory=lambda: uuid.uuid4().hex)
    rows: int = 0
    bytes: int = 0
    refused: int = 0
    payload: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.to_epoch <= self.from_epoch:
            raise ValueError(f"an epoch range ends after it begins, not at {self.to_epoch} from {self.from_epoch}")

    def written(self, *, rows: int, bytes: int = 0, refused: int = 0, **payload: Any) -> Token:
        """The token after `write`: with counts and what `commit` needs to know."""
        return replace(self, rows=rows, bytes=bytes, refused=refused, payload={**self.payload, **payload})

    def to_json(self) -> str:
        names = ("sink", "from_epoch", "to_epoch", "generation", "attempt", "rows", "bytes", "refused")
        return json.dumps({**{n: getattr(self, n) for n in names}, "payload": dict(self.payload)})

    @classmethod
    def from_json(cls, text: str) -> Token:
        return cls(**json.loads(text))


class Verdict(StrEnum):
    """What a commit has to do: apply the batch, or nothing because the target holds it already."""

    APPLY = "apply"
    ALREADY = "already"


def judge_progress(stored: Progress | None, token: Token) -> Verdict:
    """Compare the target's progress with a token. To be called inside the atomic step of `commit`.

    Raises `DefiniteError [SINK_FENCED]` for an older generation, and `TransientError [SINK_OVERLAP]` where the target
    holds a part of the range (the delivery loop then asks `last_committed` and cuts the batch again).
    """
    if stored is None:
        return Verdict.APPLY
    if stored.generation > token.generation:
        raise fenced(token.sink)
    if stored.epoch is None or stored.epoch <= token.from_epoch:
        return Verdict.APPLY
    if stored.epoch >= token.to_epoch:
        return Verdict.ALREADY
    raise TransientError(
        "SINK_OVERLAP",
        f"the target of sink {token.sink} already holds a part of the batch",
        detail=f"target at epoch {stored.epoch}, batch from {token.from_epoch} to {token.to_epoch}",
    )


def fenced(sink: str) -> DefiniteError:
    """The error of an engine whose successor has claimed the sink (I9)."""
    return DefiniteError(
        "SINK_FENCED",
        f"sink {sink} is owned by a newer engine",
        hint="only one engine may deliver to a sink: stop this one; after the loss of a data directory create the sink "
        "under another name",
    )


class SinkTraits:
    """What most sinks are: progress in the target, one atomic step, batches as DataFrames, and free to be set back."""

    durable: bool = True
    rewindable: bool = True
    takes_rows: bool = False
    wants_vnodes: bool = False

    def unfinished(self) -> tuple[int, int] | None:
        return None

    def landed(self, vnode_count: int) -> frozenset[int]:
        return frozenset()


@runtime_checkable
class Sink(Protocol):
    """Delivers batches to one target. Methods block; the engine calls them from one thread at a time, never
    concurrently.

    Order. `validate` once, then `claim`, then for each batch `prepare`, `write`, `commit`, or `abort` instead of what
    is left. Batches come in epoch order. After a restart a new object is made; it knows nothing of the old one but
    what the target and the tokens say.

    The batch. `write` gets a Spark DataFrame: the visible columns in order, then `_op TINYINT` (1 upsert, 2 delete);
    one row per sink key (append-only: any number of rows, all 1). A delete has at least its key columns filled. An
    empty DataFrame is legal: the epoch is still committed. A batch holds whole epochs, hence whole source
    transactions. The traits (`SinkTraits`) say what else a sink can take.

    Staging. What `write` does is invisible to readers of the target, however it ends, and runs as one Spark job over
    all partitions in parallel. A Spark task may run twice: only the attempt that Spark reports as successful may
    count.

    Durability. When `commit` returns, the batch and the progress `(to_epoch, generation)` are durable and visible, in
    one atomic step of the target. If it raises `IndeterminateError` they may be or become so; any other error
    promises that they are not and will not be. A commit of what the target already holds does nothing and returns.

    Asking. `last_committed` asks the target, not memory, and waits for (or ends) a commit that is still under way
    there: after it has said "not there", an earlier attempt cannot land any more.

    Fencing. After `claim` has returned in an engine of generation g, no engine of a lower generation can commit: it
    gets `DefiniteError [SINK_FENCED]` from `claim`, `prepare` or `commit`.

    Errors. `DefiniteError` needs a person (no such column), `TransientError` is retried with back-off for ever; that
    a wrong password is definite while the sink is being created is for the engine to say. Neither holds a row's value
    or a secret.

    Shutdown. `close` releases connections and may be called at any time, twice, and after errors. It commits nothing.

    Most sinks derive from `SinkTraits`, whose defaults are those of a sink that commits in one step.
    """

    name: str

    @property
    def durable(self) -> bool:
        """Whether the target remembers progress. If not, a restart goes on from the checkpoint, and may repeat."""
        ...

    @property
    def rewindable(self) -> bool:
        """Whether a user may set it back to an earlier epoch (`rewind`): what follows is delivered once more."""
        ...

    @property
    def takes_rows(self) -> bool:
        """Whether `write` does nothing with a batch but hand it to `spark.sink.run_tasks`.

        It then gets small batches as a `RowBatch` (`batch.py`) of the same columns, and its task runs once, in the
        engine.
        """
        ...

    @property
    def wants_vnodes(self) -> bool:
        """Whether it publishes a batch in several steps, and so gets `_vnode INT`, last, where each row is one of its
        input's: the rows of a vnode are then in one of the steps."""
        ...

    def unfinished(self) -> tuple[int, int] | None:
        """A range that it has begun to publish in several steps and that must come next, exactly as it was."""
        ...

    def landed(self, vnode_count: int) -> frozenset[int]:
        """The vnodes whose part of the unfinished range is in the target for certain; the others must come."""
        ...

    def validate(self, columns: Sequence[Column], key: Sequence[str]) -> None:
        """Check the target against the columns and the sink key; create the target where that is an option."""
        ...

    def claim(self) -> None:
        """Make this engine's generation the owner of the sink, in the target."""
        ...

    def prepare(self, from_epoch: int, to_epoch: int) -> Token:
        """Make room for staging the changes of `(from_epoch, to_epoch]`; remove stale staging of earlier attempts."""
        ...

    def write(self, token: Token, batch: Any) -> Token:
        """Stage the batch, a DataFrame by one Spark job; gives the token to commit."""
        ...

    def commit(self, token: Token) -> None:
        """Publish what was staged, together with the progress."""
        ...

    def last_committed(self) -> int | None:
        """The last epoch that the target holds for this sink, None if it holds none."""
        ...

    def reset(self, to_epoch: int | None) -> None:
        """Set the target's progress back to an epoch (None: to nothing) without touching data: the user's `rewind`."""
        ...

    def abort(self, token: Token) -> None:
        """Remove what the token staged. Only for a token that is known not to be committed; harmless twice."""
        ...

    def close(self) -> None:
        """Release everything; commits nothing."""
        ...
