"""What a view has consumed, when it fails between two checkpoints and when its way into the main lane is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.errors import DefiniteError, TransientError
from headwater.model.barrier import Barrier, BarrierKind, Mutation, MutationKind
from headwater.model.epoch import Epoch, EpochPair
from headwater.model.schema import Column, Schema
from headwater.runtime.dataflow import Dataflow
from headwater.runtime.tables import InputLog, Staged, TableState, ViewState
from headwater.storage.checkpoint import Contribution, JobRow, NewSegment

SCHEMA = Schema((Column("id", "INT"),), ("id",))
TABLE, VIEW = 1, 2


def segment(table_id: int, path: str) -> NewSegment:
    return NewSegment(table_id, path, "delta", 1, 1)


@pytest.fixture
def dataflow() -> Dataflow:
    meta = SimpleNamespace(change_segments=lambda *_: [], was_reset=lambda *_: False)
    core: Any = SimpleNamespace(meta=meta, job_failed=lambda *_, **__: None)
    found = Dataflow(core)
    found.tables[TABLE] = TableState(JobRow(TABLE, "t", "table", "live", "main", "", {}), SCHEMA)
    return found


def view() -> ViewState:
    job = JobRow(VIEW, "v", "view", "live", "main", "", {})
    log = InputLog(seen=[segment(TABLE, "seen")])
    return ViewState(job, SCHEMA, [segment(VIEW, "mine")], inputs={TABLE: log}, consumed_epoch=5)


def test_view_that_fails_after_a_checkpoint_has_consumed_that(dataflow: Dataflow) -> None:
    one, contribution = view(), Contribution()
    dataflow.uncommitted = [(6, segment(TABLE, "of another"))]
    dataflow.live_views._view_failed(one, DefiniteError("VIEW_FAILED", "bad row"), contribution)
    assert one.failed and contribution.states == {(VIEW, "consumed"): 5} and contribution.pins == {"job:2": 5}


def test_view_that_fails_with_rows_that_are_not_committed_goes_back_to_the_checkpoint(dataflow: Dataflow) -> None:
    """Those rows would be committed beside `consumed = 5`, and what made them be applied a second time."""
    one, contribution = view(), Contribution()
    dataflow.uncommitted = [(6, segment(VIEW, "not committed"))]
    with pytest.raises(TransientError):
        dataflow.live_views._view_failed(one, DefiniteError("VIEW_FAILED", "bad row"), contribution)
    assert not one.failed and not contribution.states


def test_view_whose_join_is_lost_enters_again_as_its_lane_left_it(dataflow: Dataflow) -> None:
    handed_over = view()
    dataflow.live_views.join(handed_over)
    joined = dataflow.live_views.states[VIEW]
    joined.segments = [*joined.segments, segment(VIEW, "staged, and lost")]
    dataflow.tables[TABLE].segments = [segment(TABLE, "newer")]
    dataflow.live_views._seen(joined)
    joined.consumed_epoch = 9
    assert handed_over == view()


@pytest.mark.parametrize(("changed", "refreshed"), [([TABLE], True), ([99], False), ([], False)])
def test_paused_barrier_refreshes_views_only_of_what_a_late_write_changed(
    dataflow: Dataflow, monkeypatch: pytest.MonkeyPatch, changed: list[int], refreshed: bool
) -> None:
    """An UPDATE that was running at the PAUSE is acknowledged after it; its view must not miss it."""
    calls = []

    async def tables(_: Any, __: Any, staged: Staged) -> None:
        for table_id in changed:
            staged.add(segment(table_id, "late"))

    async def views(*_: Any) -> None:
        calls.append(1)

    monkeypatch.setattr(dataflow, "_stage_tables", tables)
    monkeypatch.setattr(dataflow.live_views, "stage", views)
    dataflow.core.delivery = dataflow.core.row_counts = SimpleNamespace(contribute=lambda _: None)
    dataflow.live_views.states[VIEW] = view()
    asyncio.run(dataflow._stage(Barrier(EpochPair(Epoch(1), Epoch(2)), BarrierKind.CHECKPOINT, paused=True)))
    assert bool(calls) is refreshed


def test_resume_takes_nothing_with_its_own_barrier_and_the_next_one_does() -> None:
    """What has gathered is for the epochs after it: else the statement would wait for the first of them."""
    epochs = EpochPair(Epoch(1), Epoch(2))
    resume = Barrier(epochs, BarrierKind.CHECKPOINT, (Mutation(MutationKind.RESUME),), paused=False)
    assert resume.at_rest and not resume.paused
    assert not Barrier(epochs, BarrierKind.CHECKPOINT).at_rest
    assert Barrier(epochs, BarrierKind.CHECKPOINT, paused=True).at_rest
