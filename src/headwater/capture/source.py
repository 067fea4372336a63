"""The contract of a source connector, one Protocol per role. Implementations are in `connectors/`, loaded by name.

    Catalogue ──► SplitPlanner ──► SplitReader (in Spark tasks)      the copy
        └───────► ChangeStream (one reader process per stream)       the changes, into the spool

Offsets. Inside the engine a position of one stream is an `int` that orders like the stream; the source's own text for
it (Postgres: `X/Y`) is only for people, files and `hw_epochs`. A position P covers exactly the transactions that end at
or before P. A source with several streams (one per node) has one `ChangeStream` for each and a vector of positions.

Errors. A connector raises only `headwater.errors`: TransientError for what may heal by itself (it is retried, for ever
and visibly), DefiniteError for what cannot. No message holds a row's value or a secret. Methods that talk to a server
are blocking unless they are `async`; the engine calls them in a thread.

`headwater.testing` has the contract tests that every implementation must pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from headwater.capture.splits import Split
from headwater.errors import HeadwaterError

TableT = TypeVar("TableT")
TableT_co = TypeVar("TableT_co", covariant=True)
TableT_contra = TypeVar("TableT_contra", contravariant=True)


class Offsets(Protocol):
    """The order of one stream's positions, and their text.

    `parse(format(n)) == n`, and `a < b` in numbers iff a comes before b in the stream. `parse` raises UsageError for a
    text that is no position.
    """

    def parse(self, text: str) -> int: ...

    def format(self, offset: int) -> str: ...


class Catalogue(Protocol[TableT_co]):
    """What tables there are, and what one looks like.

    `list_tables` gives (schema, name) of everything that can be captured. `describe` gives columns in their order, the
    key columns in the key's order, an estimate of rows and size, and whether the order of the key is one that we can
    reproduce byte for byte (`ordered_key`); UsageError if there is no such table. Neither changes anything, and both
    see the present: a table may be altered the moment after.
    """

    def list_tables(self, schema: str | None = None) -> Sequence[tuple[str, str]]: ...

    def describe(self, schema: str, name: str) -> TableT_co: ...


class SplitPlanner(Protocol[TableT_contra]):
    """Cuts a table into splits.

    The splits are in order, do not overlap and leave nothing out: the first is open to the left, the last to the right,
    each other one begins where the one before it ends. An empty table has one split. There are at most MAX_SPLITS.
    Bounds are the source's own text of each key column. Planning is allowed to be approximate about sizes, never about
    coverage; planning twice may give different splits, so a plan is stored before its first read.
    """

    def plan_splits(self, table: TableT_contra, *, rows_per_split: int) -> list[Split]: ...


class SplitRead(Protocol):
    """A read in progress. `low` is known from its beginning, `high` when it has ended. `texts` gives a query's rows as
    the source's own text of each column, None for NULL: for tests and small things; tasks read in their own way."""

    low: str
    high: int

    def texts(self, query: str) -> list[tuple[str | None, ...]]: ...


class SplitReader(Protocol[TableT_contra]):
    """How a Spark task reads one split: everything it needs is picklable and holds no secret but a reference to one.

    `open_read` begins a read that sees one consistent state. Its `low` says which events that state contains, and
    `high`, known after the read, is a position at or after everything it contains. The rule that `contains` applies
    must never call an event contained that the read did not see (that would be loss); calling a contained one new is
    harmless, because applying an event twice gives the same row. Each connector states in prose why its rule is safe.

    `contains` takes index records of the spool (`SpoolReader.transactions`) and gives a boolean for each.

    `query` is the text of the one statement that reads the split. Reads take no lock that blocks writers and hold no
    transaction longer than the statement runs.
    """

    def query(self, table: TableT_contra, columns: Sequence[str], split: Split) -> str: ...

    def open_read(self, table: TableT_contra) -> AbstractContextManager[SplitRead]: ...

    def contains(self, low: str, transactions: Any) -> Any: ...


@runtime_checkable
class ChangeStream(Protocol):
    """One change stream and the process that copies it into a spool.

    Order and duplicates: the spool holds every transaction exactly once, whole, in commit order, whatever was killed
    and whenever. Durability: `position` is what the spool holds after fsync; it never goes back, and it moves also when
    the source writes nothing for us (keep-alives), so that whoever waits for a position of an idle source is served
    within seconds (`wait_for` nudges the source if need be).

    `ack(offset)` tells the source that it may forget its log up to `offset`. The engine calls it only with positions
    that a checkpoint has committed (I3); the implementation sends nothing beyond them. Calling it again with a smaller
    one does nothing. A transient error shows in `last_error` and goes away by itself; a definite one (`failed`) ends
    the process, is raised to everyone who waits, and stays until `start` is called again. `stop` leaves the spool as it
    is.
    """

    @property
    def failed(self) -> bool: ...

    position: int
    acknowledged: int
    connected: bool
    last_error: HeadwaterError | None

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def ack(self, lsn: int) -> None: ...

    def nudge(self, lsn: int) -> None: ...

    async def wait_for(self, lsn: int) -> None: ...


class Source(Protocol[TableT]):
    """A connector as the engine sees it: made from the options of CREATE SOURCE, checked, without a connection yet.

    `current_offset` is a position at or after everything committed before the call. `prepare_table` makes the source
    send the table's changes (publication, change tables …) and gives a mark; the table's first read must wait until
    `entered(mark)` is true, for a transaction that was running at that moment may have written before it. `waiting_for`
    names what stands in the way, for people. `release_table` and `release` undo only what we had made ourselves.
    """

    @property
    def offsets(self) -> Offsets: ...

    @property
    def catalogue(self) -> Catalogue[TableT]: ...

    @property
    def planner(self) -> SplitPlanner[TableT]: ...

    @property
    def splits(self) -> SplitReader[TableT]: ...

    def current_offset(self) -> int: ...

    def prepare_table(self, table: TableT) -> str: ...

    def entered(self, mark: str) -> bool: ...

    def waiting_for(self, mark: str) -> str: ...

    def stream(self, directory: Path, *, start: int | None, acknowledged: int) -> ChangeStream: ...

    def release_table(self, table: TableT) -> None: ...

    def release(self) -> None: ...
