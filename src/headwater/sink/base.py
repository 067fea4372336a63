"""What all sinks of the package share: their five facts, and token making. The contract is in `sink.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from headwater.errors import DefiniteError
from headwater.model.schema import Column
from headwater.sink.options import SinkOptions
from headwater.sink.sink import SinkTraits, SinkType, Token
from headwater.storage.files import path_part

UNREACHABLE_HINT: Final = "is the target up, are hostname, port and database.name right? It is tried again by itself"
LOGIN_HINT: Final = "check username, password and the target's rules for logins"


class BaseSink(SinkTraits):
    """Name, options, visible columns, sink key, generation. Subclasses add the target."""

    def __init__(
        self, name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int
    ) -> None:
        self.name = name
        self.options = options
        self.columns = tuple(columns)
        self.key = tuple(key)
        self.generation = generation

    @property
    def upsert(self) -> bool:
        return self.options.type is SinkType.UPSERT

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.columns)

    def token(self, from_epoch: int, to_epoch: int) -> Token:
        return Token(self.name, from_epoch, to_epoch, self.generation)

    def target_changed(self, what: str, *, hint: str = "") -> DefiniteError:
        """The target's schema no longer fits the sink: a state that a person must clear."""
        hint = hint or "change the target back, or drop the sink and create it again"
        return DefiniteError("SINK_TARGET_MISMATCH", f"the target of sink {self.name} {what}", hint=hint)

    def dead_letter_prefix(self, token: Token) -> str | None:
        """Where the tasks of an attempt put refused rows; None where a refused row stops the sink."""
        path = self.options["dead_letters.path"]
        return f"{path}/{path_part(self.name)}-{token.to_epoch}-{token.attempt}" if path else None

    def close(self) -> None:
        """Nothing is held open by default."""

    def rows_of(self, results: Sequence[dict[str, Any]]) -> int:
        return sum(int(r["rows"]) for r in results)
