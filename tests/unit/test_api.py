"""The engine's blocking face, where it needs no engine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headwater import Engine
from headwater.errors import UsageError


def test_an_engine_that_cannot_start_says_why_also_when_its_thread_is_slow_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = Engine._main

    def slow_to_end(engine: Engine) -> None:
        main(engine)
        time.sleep(0.5)  # the loop is closed, and the thread still there

    monkeypatch.setattr(Engine, "_main", slow_to_end)
    monkeypatch.setattr(Engine, "__exit__", _late(Engine.__exit__))
    with pytest.raises(UsageError, match="is not a master"), Engine(tmp_path / "data", master="nosuch"):
        pass


def _late(stop: object) -> object:
    def exit_(engine: Engine, *arguments: object) -> None:
        time.sleep(0.2)
        stop(engine, *arguments)  # type: ignore[operator]

    return exit_
