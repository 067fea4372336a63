"""An engine in this process that does not come up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headwater.api import Engine
from headwater.errors import DefiniteError


def test_the_cause_is_reported_though_the_loop_has_ended_before_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meta.db").write_bytes(b"this is not a database, and never was" * 300)
    main = Engine._main

    def lingering(engine: Engine) -> None:
        main(engine)
        time.sleep(0.3)

    monkeypatch.setattr(Engine, "_main", lingering)
    engine = Engine(tmp_path)
    entered = Engine.__exit__

    def later(self: Engine, *_: object) -> None:
        time.sleep(0.1)  # by now the loop is closed and the thread is not over
        entered(self)

    monkeypatch.setattr(Engine, "__exit__", later)
    with pytest.raises(DefiniteError, match="META_STORE_BROKEN"):
        engine.__enter__()
    assert engine.stopped
