"""Which names a target can have. What it cannot is refused before anything is made, in words that say which name."""

from __future__ import annotations

from collections.abc import Iterable

from headwater.errors import UsageError

RENAME = "rename the column in the sink's query (AS SELECT … AS name)"


def name_refused(what: str, name: str, why: str, *, hint: str = "") -> UsageError:
    """The error for one name: `what` is the target's word for the thing (table, column, topic)."""
    hint = hint or (RENAME if what == "column" else "choose another name")
    return UsageError(
        "SINK_NAME_REFUSED", f"the target cannot have a {what} called {shown(name)}", detail=why, hint=hint
    )


def refuse_long(what: str, names: Iterable[str], bytes_at_most: int) -> None:
    """Refuse names that are empty, hold U+0000, or are longer than the target's bound: it would cut them off."""
    for name in names:
        if not name or "\0" in name:
            raise name_refused(what, name, "it is empty or holds U+0000")
        if (size := len(name.encode())) > bytes_at_most:
            raise name_refused(what, name, f"it has {size} bytes, at most {bytes_at_most} are possible")


def shown(name: str) -> str:
    """A name in a message: quoted, its control characters escaped, and not longer than a line."""
    text = name if len(name) <= 80 else f"{name[:77]}…"
    return "'" + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) + "'"
