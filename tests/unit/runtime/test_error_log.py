"""Errors that cannot be stored are shown all the same, and stored when they can be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import TransientError, disk_full
from headwater.runtime.error_log import MAX_WAITING, ErrorLog
from headwater.storage.meta import MetaStore


@pytest.fixture
def meta(tmp_path: Path) -> Iterator[MetaStore]:
    store = MetaStore(f"sqlite:///{tmp_path}/meta.db")
    store.acquire()
    yield store
    store.close()


def refusing(*_: Any, **__: Any) -> None:
    raise disk_full()


def test_an_error_that_cannot_be_stored_is_shown_and_stored_with_its_own_time_later(
    meta: MetaStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ErrorLog(meta)
    log.record(1, "orders", TransientError("BEFORE", "before"), retrying=False)
    with monkeypatch.context() as full:
        full.setattr(meta, "record_error", refusing)
        log.record(None, "main", disk_full(), retrying=True)
        log.record(None, "main", disk_full(), retrying=True)
        shown = log.rows()
        assert [(r["code"], r["hint"]) for r in shown] == [("BEFORE", ""), ("DISK_FULL", disk_full().hint)]
        assert [r["code"] for r in meta.error_rows()] == ["BEFORE"]
    log.store()
    assert log.rows() == shown
    assert [r["at"] for r in meta.error_rows()] == [r["at"] for r in shown]


def test_what_waits_is_bounded(meta: MetaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ErrorLog(meta)
    monkeypatch.setattr(meta, "record_error", refusing)
    for number in range(3 * MAX_WAITING):
        log.record(number, f"job {number}", disk_full(), retrying=True)
    assert [r["job_id"] for r in log.rows()] == list(range(2 * MAX_WAITING, 3 * MAX_WAITING))
