"""JSON lines, and the making of batches, on a real Spark session."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headwater.connectors.files.sink import read_table
from headwater.model.schema import Column
from headwater.sink.delivery import DeliveryLoop
from headwater.sink.registry import open_sink

pytestmark = pytest.mark.spark
COLUMNS = (Column("k", "STRING"), Column("v", "INT"))
DDL = "k STRING, v INT, _op TINYINT"


def delivered(spark: Any, options: dict[str, str], rows: list[Any]) -> Any:
    sink = open_sink("trial", options, COLUMNS, ("k",), 1, os.path.expandvars)
    sink.validate(COLUMNS, ("k",))
    loop = DeliveryLoop(sink)
    loop.start(None)
    return loop.deliver(0, 1, lambda: spark.createDataFrame(rows, DDL))


def test_files_as_json_lines_hold_the_rows_that_the_manifest_names(spark: Any, tmp_path: Path) -> None:
    options = {"connector": "files", "path": str(tmp_path), "format": "json"}
    delivered(spark, options, [('a"\n', 1, 1), ("b", None, 2)])
    records = [json.loads(p.read_text()) for p in sorted((tmp_path / "_manifest").glob("*.json"))]
    files = [tmp_path / f["path"] for r in records for f in r["files"]]
    rows = [json.loads(line) for f in files for line in f.read_text().splitlines()]
    wanted = [{"k": 'a"\n', "v": 1, "_op": 1}, {"k": "b", "v": None, "_op": 2}]
    assert sorted(rows, key=str) == sorted(wanted, key=str)
    assert read_table(tmp_path).to_pylist() == [{"k": 'a"\n', "v": 1}]


def test_a_foreign_sink_key_gets_one_net_change_per_key(spark: Any) -> None:
    from headwater.spark.sink import net_by_key

    changes = [("x", 1, 2), ("y", 1, 1), ("x", 2, 1), ("z", 3, 2)]
    rows = net_by_key(spark.createDataFrame(changes, DDL), ["k"]).collect()
    assert {(r.k, r._op) for r in rows} == {("x", 1), ("y", 1), ("z", 2)}
    assert next(r.v for r in rows if r.k == "x") == 2


def test_an_append_only_batch_drops_deletes_only_when_told_to(spark: Any) -> None:
    from headwater.spark.sink import appended

    changes = spark.createDataFrame([("a", 1, 1), ("b", None, 2)], DDL)
    assert [r.k for r in appended(changes, force=True).collect()] == ["a"]
    with pytest.raises(Exception, match="SINK_NOT_APPEND_ONLY"):
        appended(changes, force=False).collect()
