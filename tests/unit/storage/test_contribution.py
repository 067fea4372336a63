"""Contributions add up in order: what a later barrier clears was not there for the commit."""

from __future__ import annotations

from headwater.storage.checkpoint import Contribution, NewSegment, merged


def _segment(table_id: int, path: str) -> NewSegment:
    return NewSegment(table_id, path, "delta", 2, 10)


def test_contributions_of_several_actors_add_up() -> None:
    total = merged(
        [
            Contribution(
                segments_added=[_segment(1, "a")], positions={1: "x"}, job_updates={5: {"state": "a", "lane": "m"}}
            ),
            Contribution(segments_added=[_segment(2, "b")], positions={1: "y"}, job_updates={5: {"state": "b"}}),
        ]
    )
    assert [s.path for s in total.segments_added] == ["a", "b"]
    assert total.positions == {1: "y"} and total.job_updates == {5: {"state": "b", "lane": "m"}}
    assert total.rows == 4


def test_a_reset_hides_segments_of_earlier_barriers_only() -> None:
    total = Contribution(segments_added=[_segment(1, "old"), _segment(2, "other")])
    total.merge(Contribution(resets=[1], segments_added=[_segment(1, "new")]))
    assert [s.path for s in total.segments_added] == ["other", "new"]


def test_a_pin_that_is_dropped_later_is_not_set() -> None:
    total = Contribution(pins={"a": 1, "b": 1})
    total.merge(Contribution(pins_dropped=["a"]))
    assert total.pins == {"b": 1} and total.pins_dropped == ["a"]
    total.merge(Contribution(pins={"a": 2}))
    assert total.pins == {"b": 1, "a": 2}


def test_states_that_are_cleared_later_are_not_written() -> None:
    total = Contribution(states={(1, "x"): 1, (2, "x"): 2})
    total.merge(Contribution(states_cleared=[1], states={(1, "y"): 3}))
    assert total.states == {(2, "x"): 2, (1, "y"): 3}


def test_merging_leaves_what_is_merged_alone() -> None:
    part = Contribution(segments_added=[_segment(1, "a")], job_updates={1: {"state": "x"}}, pins={"p": 1})
    total = Contribution()
    total.merge(part)
    total.merge(Contribution(resets=[1], job_updates={1: {"state": "y"}}, pins_dropped=["p"]))
    assert part == Contribution(segments_added=[_segment(1, "a")], job_updates={1: {"state": "x"}}, pins={"p": 1})


def test_parts_of_a_spec_that_change_at_once_are_both_kept() -> None:
    total = Contribution(job_updates={5: {"spec_patch": {"settings": {"rate": 1}}}})
    total.merge(Contribution(job_updates={5: {"spec_patch": {"schema": "new"}, "state": "live"}, 6: {"state": "a"}}))
    total.merge(Contribution(job_updates={5: {"spec_patch": {"settings": {"rate": 2}}}}))
    assert total.job_updates[5] == {"spec_patch": {"settings": {"rate": 2}, "schema": "new"}, "state": "live"}
    assert total.job_updates[6] == {"state": "a"}
