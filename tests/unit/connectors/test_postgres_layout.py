"""What a table's layout in the catalogue says about old rows, without a server."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headwater.connectors.postgres.layout import Layout, compare_layouts, compare_partitions

BEFORE = Layout(
    columns={"id": [1, "700"], "a": [2, "700"], "mood": [3, "700"]},
    files={"16385": 16385},
    labels={"mood": {"16400": "sad", "16402": "happy"}},
    partitions={},
)


def test_a_layout_survives_being_remembered() -> None:
    assert Layout.from_dict(json.loads(json.dumps(BEFORE.as_dict()))) == BEFORE


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, ""),
        ({"columns": {**BEFORE.columns, "a": [4, "710"]}}, "column a is another one than before"),
        ({"columns": {**BEFORE.columns, "a": [2, "710"]}}, ""),  # SET NOT NULL, or another default
        ({"files": {"16385": 16999}}, ""),  # VACUUM FULL
        ({"columns": {**BEFORE.columns, "a": [2, "710"]}, "files": {"16385": 16999}}, "column a was rewritten"),
        (
            {"columns": {**BEFORE.columns, "other": [4, "710"]}, "files": {"16385": 16999}},
            "",
        ),  # by a default
        ({"columns": {"id": [1, "700"], "mood": [3, "700"]}}, ""),  # the stream says that it is gone
        ({"labels": {"mood": {"16400": "sad", "16402": "happy", "16404": "new"}}}, ""),
        (
            {"labels": {"mood": {"16400": "blue", "16402": "happy"}}},
            "column mood is an enum whose labels have other names",
        ),
    ],
)
def test_only_what_changes_old_rows_unseen_counts(now: dict[str, object], said: str) -> None:
    assert str(compare_layouts(BEFORE, replace(BEFORE, **now), ["id", "a", "mood"])) == said  # type: ignore[arg-type]


def test_a_column_that_is_not_taken_is_no_matter() -> None:
    now = replace(BEFORE, columns={**BEFORE.columns, "a": [4, "710"]})
    assert not compare_layouts(BEFORE, now, ["id"])


def test_partitions_that_went_and_tables_that_became_one_are_named_and_new_ones_are_not() -> None:
    before = replace(BEFORE, partitions={"1": ["jan", False], "2": ["feb", True]})
    now = replace(BEFORE, partitions={"2": ["feb", True], "3": ["mar", False], "4": ["was_a_table", True]})
    assert compare_partitions(before, now) == (["jan"], ["was_a_table"])
