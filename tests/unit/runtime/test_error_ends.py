"""When an error is over: it leaves what is shown as a problem, and hw_errors has its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.cli.live import open_errors
from headwater.errors import DefiniteError
from headwater.model.epoch import MAX_EPOCH, Epoch
from headwater.runtime.error_ends import NOT_RELEASED, NOT_RELEASED_S, QUIET_S, is_over
from headwater.runtime.error_log import ErrorLog, Kind
from headwater.runtime.registry import Registry
from headwater.runtime.status import ERRORS_SHOWN, shown_errors
from headwater.storage.checkpoint import JobRow
from headwater.storage.meta import MetaStore

NOW = time.time() + 100_000  # however long the tests before take
QUIET = time.time() - 2 * QUIET_S


def core(*jobs: JobRow, **parts: Any) -> Any:
    """An engine in which everything is well, but for what is said."""
    source = SimpleNamespace(connected=True, error=None, healing=False)
    capture = {"sources": {1: source}, "healing": SimpleNamespace(heals=lambda _: False), "read_at": lambda _: 0.0}
    return SimpleNamespace(
        registry=Registry(jobs),
        capture=SimpleNamespace(**{**capture, **parts.get("capture", {})}),
        delivery=SimpleNamespace(sinks={4: SimpleNamespace(well_at=parts.get("delivered", 0.0))}),
        creating=SimpleNamespace(troubled=parts.get("troubled", set())),
        maintenance=SimpleNamespace(well_at=parts.get("kept", 0.0)),
        functions=SimpleNamespace(broken=parts.get("broken", set())),
    )


def job(job_id: int, kind: str, state: str = "live", live_epoch: int = 1) -> JobRow:
    return JobRow(job_id, f"{kind}{job_id}", kind, state, "main", "", {}, live_epoch=live_epoch)


def of(job: JobRow | int, code: str = "A") -> Kind:
    return Kind(job, "gone", code) if isinstance(job, int) else Kind(job.id, job.name, code)


def test_an_error_ends_when_its_job_is_dropped() -> None:
    assert is_over(core(), of(7), NOW)


def test_an_error_of_a_source_ends_when_its_reader_is_connected_again() -> None:
    source = job(1, "source")
    assert is_over(core(source), of(source), NOW)
    for wrong in ({"connected": False}, {"error": "x"}, {"healing": True}):
        sources = {1: SimpleNamespace(**{"connected": True, "error": None, "healing": False, **wrong})}
        assert not is_over(core(source, capture={"sources": sources}), of(source), NOW)


def test_an_error_of_a_sink_ends_when_it_has_delivered_since() -> None:
    sink = job(4, "sink")
    assert not is_over(core(sink, delivered=NOW - 5), of(sink), NOW)
    assert is_over(core(sink, delivered=NOW + 1), of(sink), NOW)


def test_an_error_of_a_view_or_table_ends_when_it_is_live_and_quiet() -> None:
    for kind in ("view", "table"):
        assert is_over(core(job(2, kind)), of(job(2, kind)), QUIET)
        assert not is_over(core(job(2, kind)), of(job(2, kind)), NOW)
        assert not is_over(core(job(2, kind, "failed")), of(job(2, kind)), QUIET)
    creating = job(2, "view", "creating")
    assert not is_over(core(creating, troubled={2}), of(creating), QUIET)
    assert is_over(core(creating), of(creating), QUIET)


def test_an_error_of_a_copy_ends_when_a_read_succeeds() -> None:
    table = job(2, "table", "creating")
    assert not is_over(core(table), of(table), QUIET)
    assert is_over(core(table, capture={"read_at": lambda _: NOW}), of(table), QUIET)
    heals = {"healing": SimpleNamespace(heals=lambda _: True)}
    assert not is_over(core(job(2, "table"), capture=heals), of(table), QUIET)


def test_what_only_a_new_copy_mends_stays_until_there_is_one() -> None:
    before, after = (int(Epoch.at_unix_ms(int((QUIET + d) * 1000))) for d in (-60, 1))
    for epoch, over in ((before, False), (after, True), (MAX_EPOCH, False)):
        table = job(2, "table", live_epoch=epoch)
        assert is_over(core(table), of(table, "SOURCE_PARTITIONS_CHANGED"), QUIET) is over


def test_errors_without_a_job_end_when_their_part_has_worked_since() -> None:
    assert is_over(core(), Kind(None, "main", "DISK_FULL"), NOW)  # asked after a checkpoint
    assert is_over(core(kept=NOW + 1), Kind(None, "maintenance", "A"), NOW)
    assert not is_over(core(kept=NOW - 1), Kind(None, "maintenance", "A"), NOW)
    assert not is_over(core(broken={"f"}), Kind(None, "f", "A"), QUIET)
    assert is_over(core(), Kind(None, "f", "A"), QUIET)
    assert not is_over(core(), Kind(None, "shop", NOT_RELEASED), QUIET)
    assert is_over(core(), Kind(None, "shop", NOT_RELEASED), QUIET - 2 * NOT_RELEASED_S)


@pytest.fixture
def meta(tmp_path: Path) -> Iterator[MetaStore]:
    store = MetaStore(f"sqlite:///{tmp_path}/meta.db")
    store.acquire()
    yield store
    store.close()


def test_an_end_is_stored_once_and_known_after_a_restart(meta: MetaStore) -> None:
    log = ErrorLog(meta)
    for name in ("a", "b", "a"):
        log.record(1, name, DefiniteError("A", "what"), retrying=True)
    log = ErrorLog(meta)  # a restart
    asked: list[str] = []
    log.end(lambda kind, at: asked.append(kind.name) is None and kind.name == "a")
    assert sorted(asked) == ["a", "b"]
    assert [(r["name"], r["ended_at"] is not None) for r in log.rows()] == [("a", True), ("b", False), ("a", True)]
    first = log.rows()[0]["ended_at"]
    log.record(1, "a", DefiniteError("A", "what"), retrying=True)
    assert [r["ended_at"] for r in log.rows()] == [first, None, first, None]
    ErrorLog(meta).end(lambda kind, at: True)
    assert all(r["ended_at"] for r in meta.error_rows()) and meta.error_rows()[0]["ended_at"] == first


def test_an_open_error_is_shown_however_many_came_since() -> None:
    ended = {"job_id": 1, "name": "n", "code": "B", "ended_at": "x"}
    old = {"job_id": 2, "name": "stopped", "code": "A", "ended_at": None}
    shown = shown_errors([{**old, "at": 1}, {**old, "at": 2}, *[{**ended, "at": i} for i in range(3, 200)]])
    assert len(shown) == ERRORS_SHOWN + 1 and shown[0]["at"] == 2
    assert open_errors({"errors": shown}) == [shown[0]]
