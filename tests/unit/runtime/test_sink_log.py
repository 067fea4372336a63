"""The history of a sink's log, as the meta store has it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from headwater.runtime.sink_log import ChangeLog
from headwater.storage.checkpoint import Contribution, NewSegment
from headwater.storage.meta import MAIN_LANE, MetaStore


def test_history_is_read_in_pages_with_every_segment_of_an_epoch(tmp_path: Path) -> None:
    store = MetaStore(f"sqlite:///{tmp_path}/meta.db")
    store.acquire()
    for epoch in range(1, 7):
        added = [NewSegment(1, f"{epoch}{part}", "delta", 10, 100, True) for part in "ab"]
        store.commit_checkpoint(MAIN_LANE, epoch, Contribution(segments_added=added), seq_high=1)
    store.commit_checkpoint(MAIN_LANE, 7, Contribution(resets=[1]), seq_high=1)
    log = ChangeLog(SimpleNamespace(meta=store), 1)
    page = log.epochs(1, 99, 2)
    assert [(e.epoch, e.rows, e.chunks[0].segments) for e in page] == [(2, 20, ("2a", "2b")), (3, 20, ("3a", "3b"))]
    assert [e.epoch for e in log.epochs(4, 99, 10)] == [5, 6, 7], "a reset is an epoch of the log, too"
    assert log.epochs(7, 99, 10) == []
    assert log.backlog(1, 99).rows == 100 and log.backlog(1, 99).epochs == 6
