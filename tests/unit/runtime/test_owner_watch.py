"""An engine that was replaced hears of it without a commit of its own."""

from __future__ import annotations

import threading
from pathlib import Path

from headwater.errors import HeadwaterError
from headwater.runtime.owner_watch import OwnerWatch
from headwater.storage.location import claim_meta_store
from headwater.storage.meta import MetaStore


def test_a_newer_owner_is_noticed_and_told_once(tmp_path: Path) -> None:
    store = MetaStore(claim_meta_store(tmp_path, None))
    store.acquire()
    told: list[HeadwaterError] = []
    heard = threading.Event()

    def tell(error: HeadwaterError) -> None:
        told.append(error)
        heard.set()
        raise RuntimeError("the loop is closed")

    watch = OwnerWatch(store, tell, look_s=0.02)
    assert not heard.wait(0.2) and watch.fenced is None
    MetaStore(store.url).acquire()
    assert heard.wait(10)
    assert [e.code for e in told] == ["ENGINE_FENCED"] and watch.fenced is told[0]
    watch.stop()


def test_a_meta_store_that_is_away_says_nothing_about_its_owner(tmp_path: Path) -> None:
    store = MetaStore(claim_meta_store(tmp_path, None))
    store.acquire()
    (tmp_path / "meta.db").rename(tmp_path / "aside.db")
    (tmp_path / "meta.db").mkdir()
    store.engine.dispose()
    told: list[HeadwaterError] = []
    watch = OwnerWatch(store, told.append, look_s=0.02)
    assert not threading.Event().wait(0.2)
    assert told == [] and watch.fenced is None
    watch.stop()
