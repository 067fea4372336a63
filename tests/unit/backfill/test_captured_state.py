"""What a hand-over does with the staged files when the table was truncated."""

from __future__ import annotations

from typing import Any

from headwater.backfill.cdc.state import SplitState
from headwater.runtime.splits import EpochPart, SplitInfo, in_order
from headwater.storage.checkpoint import NewSegment, SplitRow


def split(number: int, low_lsn: int, snapshot: str) -> SplitInfo:
    row = SplitRow(1, 1, number, None, None, SplitState.STAGED, offset_low=snapshot)
    return SplitInfo(row, SplitState.STAGED, NewSegment(1, f"file {number}", "base", 1, 1), low_lsn)


def handed(truncate: list[int] | None, *splits: SplitInfo) -> list[str]:
    backfill: Any = None
    state = EpochPart(backfill, 0, 0, (), (0,), (None,), list(splits))
    return [s.path for s in state.handed_segments(truncate)]


def test_without_a_truncate_every_staged_file_is_taken() -> None:
    assert handed(None, split(1, 10, "5:5:"), split(2, 20, "5:5:")) == ["file 1", "file 2"]


def test_a_truncate_that_the_read_had_not_seen_empties_what_it_read() -> None:
    assert handed([100, 7], split(1, 50, "5:6:")) == []


def test_a_truncate_that_the_read_had_seen_leaves_its_rows() -> None:
    # An older transaction was still running, so the read's position lies before the TRUNCATE all the same.
    assert handed([100, 7], split(1, 50, "3:9:3")) == ["file 1"]


def test_a_truncate_before_everything_unseen_leaves_the_rows() -> None:
    assert handed([100, 7], split(1, 100, "5:6:")) == ["file 1"]


def test_each_split_is_judged_by_its_own_read() -> None:
    assert handed([100, 7], split(1, 50, "5:6:"), split(2, 50, "9:9:")) == ["file 2"]


def test_splits_that_were_cut_have_the_order_of_their_ranges_and_not_of_their_numbers() -> None:
    ranges = [(1, None, '["3"]'), (2, '["7"]', None), (3, '["3"]', '["5"]'), (4, '["5"]', '["7"]')]
    rows = [SplitRow(1, 1, number, left, right, SplitState.PLANNED) for number, left, right in ranges]
    assert [row.split_id for row in in_order(rows)] == [1, 3, 4, 2]
    assert in_order([]) == []
