"""What status says of views and their inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headwater.barrier.progress import JobProgress
from headwater.model.epoch import MAX_EPOCH
from headwater.runtime.registry import Registry
from headwater.runtime.row_counts import RowCount
from headwater.runtime.status import progress_rows
from headwater.runtime.view_creator import ViewCreator
from headwater.storage.checkpoint import JobRow


def job(job_id: int, kind: str, state: str = "live", *, inputs: tuple[int, ...] = (), live_epoch: int = 5) -> JobRow:
    spec = {"inputs": list(inputs), "captured": {"x": 1}}
    return JobRow(job_id, f"{kind}{job_id}", kind, state, "main", "", spec, live_epoch=live_epoch)


def rows_of(*jobs: JobRow) -> dict[str, dict[str, Any]]:
    progress = {j.id: JobProgress.restored(j.id, j.name, j.state, {"rows": 100 * j.id}) for j in jobs}
    counts = SimpleNamespace(of=lambda j: RowCount(j.id, 7))
    core: Any = SimpleNamespace(
        registry=Registry(jobs),
        progress_of=progress.__getitem__,
        row_counts=counts,
        waiting_for="",
    )
    return {str(r["name"]): r for r in progress_rows(core)}


def test_a_view_whose_tables_are_being_copied_says_so() -> None:
    copied = job(1, "table", "creating", live_epoch=MAX_EPOCH)
    views = job(2, "view", inputs=(1,)), job(3, "view", inputs=(2,))
    rows = rows_of(copied, *views)
    assert rows["view2"]["waiting_for"] == rows["view3"]["waiting_for"] == "the copy of table1"
    for state, live_epoch in (("live", 5), ("creating", 5)):  # done, or copied again beside rows that are complete
        rows = rows_of(job(1, "table", state, live_epoch=live_epoch), *views)
        assert rows["view2"]["waiting_for"] is None


def test_rows_are_progress_while_a_job_is_created_and_the_count_from_then_on() -> None:
    rows = rows_of(
        job(1, "table", "creating", live_epoch=MAX_EPOCH),
        job(2, "table"),
        job(3, "table", "failed"),
        job(4, "table", "failed", live_epoch=MAX_EPOCH),
        job(5, "sink"),
    )
    assert {name: row["rows"] for name, row in rows.items()} == {
        "table1": 100,
        "table2": 2,
        "table3": 3,
        "table4": 400,
        "sink5": 500,
    }
    assert rows["table2"]["rows_epoch"] == 7 and "rows_epoch" not in rows["sink5"]


def test_a_view_is_not_created_over_a_table_that_has_failed() -> None:
    view = job(2, "view", "creating", inputs=(1,))
    for state, waits in (("failed", "table table1 (failed)"), ("live", ""), ("creating", "")):
        core = SimpleNamespace(paused=False, registry=Registry([job(1, "table", state), view]))
        creator: Any = SimpleNamespace(core=core, job=view)
        assert ViewCreator._waiting_for(creator, None) == waits
