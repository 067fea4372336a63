"""Tables without a key: the vectorised netting of an epoch's events against plain counting, over several epochs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.errors import DefiniteError
from headwater.model.schema import OP, ROW_ID, ROW_NO, SEQ, Column, multiset
from headwater.spark.multiset import copied_numbers, net_changes
from headwater.storage.files import DataDir
from headwater.storage.segments import write_segment

SCHEMA = multiset([Column("v", "STRING")])
Events = list[tuple[int, str]]  # (sign, row)


def arrivals(events: Events) -> pa.Table:
    return pa.table(
        {
            "v": pa.array([v if sign > 0 else None for sign, v in events], pa.string()),
            ROW_ID: pa.array([v * 4 for _, v in events], pa.string()),
            "_hw_sign": pa.array([s for s, _ in events], pa.int64()),
            "_hw_order": pa.array(range(len(events)), pa.int64()),
        }
    )


def possible(start: Counter[str], events: Events) -> Events:
    """Only rows that are there can go."""
    bag, kept = Counter(start), []
    for sign, v in events:
        if sign > 0 or bag[v] > 0:
            bag[v] += sign
            kept.append((sign, v))
    return kept


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    copied=st.lists(st.sampled_from("abc"), max_size=8),
    epochs=st.lists(st.lists(st.tuples(st.sampled_from([1, -1]), st.sampled_from("abcd")), max_size=12), max_size=4),
)
def test_after_every_epoch_each_row_is_there_as_often_as_counted(
    tmp_path: Path, copied: list[str], epochs: list[Events]
) -> None:
    data_dir = DataDir(str(tmp_path))
    bag, live, paths = Counter(copied), dict[tuple[str, int], str](), list[str]()
    base = pa.table({"v": pa.array(copied, pa.string()), ROW_ID: pa.array([v * 4 for v in copied], pa.string())})
    base = base.append_column(ROW_NO, copied_numbers(1, 1, len(copied)))
    base = base.append_column(OP, pa.array([1] * len(copied), pa.int8()))
    base = base.append_column(SEQ, pa.array([0] * len(copied), pa.int64()))
    if copied:
        paths.append(write_segment(data_dir, 1, SCHEMA, base, kind="base", vnode_count=4).path)
        live = {(r[ROW_ID], r[ROW_NO]): r["v"] for r in base.to_pylist()}
    for number, wanted in enumerate(epochs):
        events = possible(bag, wanted)
        if not events:
            continue
        rows = net_changes(
            arrivals(events), SCHEMA, data_dir=data_dir, segments=paths, vnode_count=4, seq_base=1000 * (number + 1),
            strict=True,
        )  # fmt: skip
        for sign, v in events:
            bag[v] += sign
        for row in rows.to_pylist():
            key = (row[ROW_ID], row[ROW_NO])
            if row[OP] == 2:
                del live[key]  # a KeyError: something goes that is not there
            else:
                assert key not in live
                live[key] = row["v"]
        if rows.num_rows:
            paths.append(write_segment(data_dir, 1, SCHEMA, rows, kind="delta", vnode_count=4).path)
        assert Counter(live.values()) == +bag


def test_a_row_that_goes_and_is_not_there_is_an_error_or_passed_over(tmp_path: Path) -> None:
    def net(strict: bool) -> pa.Table:
        return net_changes(
            arrivals([(-1, "a"), (1, "b")]), SCHEMA, data_dir=DataDir(str(tmp_path)), segments=[], vnode_count=4,
            seq_base=1, strict=strict,
        )  # fmt: skip

    assert net(strict=False).column("v").to_pylist() == ["b"]
    with pytest.raises(DefiniteError) as caught:
        net(strict=True)
    assert caught.value.code == "ROW_UNKNOWN"


def test_numbers_of_copied_rows_are_never_given_twice() -> None:
    found = [n for g in (1, 2, 60_000) for s in (1, 2, 10_000) for n in copied_numbers(g, s, 3).to_pylist()]
    assert len(set(found)) == len(found)
    assert max(found) < 0
