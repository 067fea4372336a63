"""What a sink says about itself: part of its contract, with defaults for a class that does not care."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headwater.connectors.trial.sink import BlackholeSink
from headwater.errors import UsageError
from headwater.runtime.rewind import check_rewind
from headwater.sink.registry import open_sink
from headwater.sink.sink import Sink


class Bare:
    """A user's sink that derives from nothing of ours."""

    name = "bare"

    def __init__(self, *_: Any) -> None: ...

    def nothing(self, *_: Any) -> None: ...

    validate = claim = prepare = write = commit = last_committed = reset = abort = close = nothing


class Final(Bare):
    rewindable = False


def opened(cls: str) -> Sink:
    options = {"connector": "python", "class": f"{__name__}:{cls}", "type": "append-only"}
    return open_sink("s", options, (), (), 1, str)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under importlib mode a test module is not found by its name."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Bare=Bare, Final=Final))  # type: ignore[arg-type]


def test_class_that_says_nothing_of_itself_is_durable_and_takes_dataframes_only() -> None:
    sink = opened("Bare")
    assert (sink.durable, sink.rewindable, sink.takes_rows, sink.wants_vnodes) == (True, True, False, False)
    assert sink.unfinished() is None and sink.landed(8) == frozenset()


def test_print_and_blackhole_say_that_they_forget() -> None:
    assert not BlackholeSink.durable and BlackholeSink.takes_rows


def test_sink_whose_class_allows_no_rewind_is_not_set_back() -> None:
    worker: Any = SimpleNamespace(name="s", rewindable=opened("Final").rewindable)
    with pytest.raises(UsageError, match="SINK_NOT_REWINDABLE"):
        check_rewind(worker, 1)
