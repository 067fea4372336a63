from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.barrier.progress import JobProgress, percent_of

REPORTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(0, 5000), st.integers(0, 9999), st.integers(0, 60))
)


@given(REPORTS)
def test_within_a_generation_totals_never_decrease_and_older_generations_are_ignored(
    reports: list[tuple[int, int, int, int, int]],
) -> None:
    progress, now = JobProgress(1, "j"), 0.0
    for generation, done, rows, size, total in reports:
        now += 0.5
        before = (progress.generation, progress.done, progress.rows, progress.bytes)
        taken = progress.report(now_s=now, generation=generation, done=done, rows=rows, bytes=size, total=total)
        after = (progress.generation, progress.done, progress.rows, progress.bytes)
        assert taken == (generation >= before[0])
        assert after[0] == max(before[0], generation)
        if after[0] == before[0]:
            assert all(a >= b for a, b in zip(after, before, strict=True))
        if not taken:
            assert after == before
        assert 0 <= progress.percent <= 99.99 and progress.rows_per_s(now) >= 0


def test_the_text_is_percent_and_counts() -> None:
    progress = JobProgress(1, "j")
    assert progress.text() == "0.00% (0/0)"
    progress.report(now_s=0, done=1234, total=10_000)
    assert progress.text() == "12.34% (1234/10000)"
    progress.report(now_s=0, rows=1, total_rows=3)
    assert progress.text() == "33.33% (1/3)"


def test_it_shows_at_most_99_99_percent_until_it_is_done() -> None:
    progress = JobProgress(1, "j")
    progress.report(now_s=0, done=1_000_000, total=1_000_000)
    assert progress.text() == "99.99% (1000000/1000000)"
    progress.report(now_s=0, done=999_999)
    assert progress.percent == 99.99 and progress.eta_s(0) is None
    progress.finish()
    assert (progress.text(), progress.percent, progress.eta_s(0), progress.phase) == ("100%", 100.0, 0.0, "live")


def test_rate_and_eta_come_from_the_last_seconds() -> None:
    progress = JobProgress(1, "j")
    for second in range(30):
        progress.report(
            now_s=second, rows=100 * second if second < 15 else 1400 + 1000 * (second - 14), total_rows=20_000
        )
    assert progress.rows_per_s(29) == 1000.0
    assert progress.eta_s(29) == round((20_000 - progress.rows) / 1000, 1)
    assert progress.rows_per_s(45) == 0.0 and progress.eta_s(45) is None
    unknown = JobProgress(1, "j")
    for second in range(5):
        unknown.report(now_s=second, rows=100 * second, done=second, total=12)
    assert unknown.eta_s(4) == 8.0  # of 12 parts 8 are left, a second each


def test_a_slow_copy_has_a_rate_also_between_its_steps_until_it_stands_still() -> None:
    progress = JobProgress(1, "j")
    for second in range(0, 61, 15):  # each step is told twice: when it is read, and when it is handed over
        progress.report(now_s=second, rows=300 * second, total_rows=60_000)
        progress.report(now_s=second + 1, rows=300 * second, done=second // 15, total_rows=60_000)
    assert [progress.rows_per_s(now) for now in (61, 75, 89)] == [300.0] * 3
    assert progress.eta_s(75) == 140.0
    assert progress.rows_per_s(91) == 0.0 and progress.eta_s(91) is None


def test_percent_does_not_fall_when_a_part_is_cut_in_two() -> None:
    progress = JobProgress(1, "j")
    before = {"done": 1, "total": 2}
    progress.report(now_s=0, **before)
    progress.report(now_s=1, done=1, total=3, least_percent=percent_of(**before))
    assert (progress.percent, progress.done, progress.total) == (50.0, 1, 3)
    progress.report(now_s=2, generation=1, done=0, total=3)
    assert progress.percent == 0.0


def test_the_row_says_what_it_waits_for() -> None:
    progress = JobProgress(7, "orders")
    progress.report(now_s=0, phase="backfill", waiting_for="transaction 12")
    row = progress.row(0)
    assert (row["job_id"], row["phase"], row["waiting_for"], row["eta_s"]) == (7, "backfill", "transaction 12", None)
    progress.finish()
    assert progress.row(0)["waiting_for"] is None and progress.row(0)["percent"] == 100.0


def test_a_restart_goes_on_from_the_totals_of_the_last_checkpoint() -> None:
    progress = JobProgress(1, "j")
    progress.report(now_s=0, generation=2, done=3, total=10, rows=300, total_rows=1000, bytes=4000)
    again = JobProgress.restored(1, "j", "creating", progress.totals())
    assert again.row(0) | {"phase": ""} == progress.row(0) | {"phase": ""}
    assert not again.report(now_s=1, generation=1, rows=500)
    again.report(now_s=1, generation=2, done=1, rows=100)
    assert (again.done, again.rows, again.percent) == (3, 300, 30.0)


def test_a_job_that_is_live_is_done_after_a_restart() -> None:
    again = JobProgress.restored(1, "j", "live", None)
    assert (again.phase, again.percent, again.text()) == ("live", 100.0, "100%")


def test_a_live_job_shows_the_rate_of_its_changes_and_is_idle_after_them() -> None:
    progress = JobProgress(1, "t", total=4)
    progress.report(now_s=0.0, done=4, rows=1000)
    progress.finish()
    assert progress.rows_per_s(1.0) == 0.0
    for second in range(1, 21):
        progress.changed(float(second), 50)
    assert progress.rows_per_s(20.0) == pytest.approx(50.0, rel=0.2)
    assert progress.rows_per_s(26.0) < 30.0
    assert progress.rows_per_s(40.0) == 0.0
    assert progress.rows == 1000
