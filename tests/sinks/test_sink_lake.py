"""Upserts into Delta and Iceberg: only touched files are rewritten, by Spark, and other writers are noticed."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs
from pyspark.sql import functions as F

from headwater.errors import DefiniteError, TransientError
from headwater.model.schema import Column
from headwater.sink import lake
from headwater.sink.delivery import DeliveryLoop
from sink_world import SinkWorld, Target

pytestmark = pytest.mark.spark
COLUMNS = (Column("id", "BIGINT", nullable=False), Column("name", "STRING"), Column("amount", "DECIMAL(10,2)"))
DDL = "id BIGINT, name STRING, amount DECIMAL(10,2), _op TINYINT"


@pytest.fixture(params=["delta", "iceberg"])
def target(request: pytest.FixtureRequest, sink_world: SinkWorld) -> Target:
    return sink_world.target(str(request.param))


def started(target: Target) -> Any:
    sink = target.open(1)
    sink.validate(COLUMNS, ("id",))
    loop = DeliveryLoop(sink)
    loop.start(None)
    return loop


def files(sink: Any) -> set[str]:
    return {f.url for f in sink.files(sink.load(), {})}


def test_only_files_that_hold_a_key_of_the_batch_are_rewritten(spark: Any, target: Target) -> None:
    loop = started(target)
    for i in range(3):  # three files with keys 0–99, 100–199, 200–299
        rows = spark.range(100 * i, 100 * i + 100, 1, 1).selectExpr(
            "id", "'first' AS name", "CAST(1 AS DECIMAL(10,2)) AS amount", "CAST(1 AS TINYINT) AS _op"
        )
        loop.deliver(i, i + 1, lambda rows=rows: rows)
    before = files(loop.sink)
    changes = [(150, "second", None, 1), (151, None, None, 2), (999, "new", None, 1)]
    loop.deliver(3, 4, lambda: spark.createDataFrame(changes, DDL).coalesce(1))
    after = files(loop.sink)
    assert len(before) == 3 and len(before & after) == 2, "two of three files had no key of the batch"
    found = {r[0]: r[1] for r in target.rows(False)}
    assert (len(found), found[150], found[999]) == (300, "second", "new") and 151 not in found


def test_statistics_spare_reading_files_that_cannot_hold_the_key(spark: Any, target: Target) -> None:
    loop = started(target)
    for i in range(2):
        loop.deliver(i, i + 1, lambda i=i: spark.createDataFrame([(i * 100, "a", None, 1)], DDL).coalesce(1))
    sink = loop.sink
    within = sink.files(sink.load(), {"id": lake.Bounds(90, 110, False)})
    assert len(within) == 1
    assert len(sink.files(sink.load(), {"id": lake.Bounds(0, 200, False)})) == 2


def leftovers(sink: Any) -> list[str]:
    """What lies in the staging directories of a table and holds no row: empty files, empty folders, marks."""
    filesystem, root = lake.filesystem_of(sink.location(sink.load()))
    found = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    ours = [i for i in found if "/headwater-" in i.path and not i.base_name.endswith(".crc")]
    folders = {i.path.rsplit("/", 1)[0] for i in ours}
    files = [i for i in ours if i.type is fs.FileType.File]
    rows = {i.path: pq.read_metadata(i.path).num_rows if i.path.endswith(".parquet") else 0 for i in files}
    return [p for p, n in rows.items() if n == 0] + [
        i.path for i in ours if i.type is fs.FileType.Directory and i.path not in folders
    ]


def test_no_empty_file_or_folder_is_left_and_an_attempt_that_was_not_needed_goes(spark: Any, target: Target) -> None:
    loop = started(target)
    loop.deliver(0, 1, lambda: spark.createDataFrame([(1, "a", None, 1), (2, "b", None, 1)], DDL).coalesce(1))
    loop.deliver(1, 2, lambda: spark.createDataFrame([(1, None, None, 2), (2, None, None, 2)], DDL).coalesce(1))
    assert target.rows(False) == [] and leftovers(loop.sink) == []
    loop.deliver(2, 3, lambda: spark.createDataFrame([], DDL))
    loop.deliver(3, 4, lambda: spark.createDataFrame([(3, "c", None, 1)], DDL).repartition(2))
    assert leftovers(loop.sink) == []
    token = loop.sink.prepare(3, 4)
    token = loop.sink.write(token, spark.createDataFrame([(3, "c", None, 1)], DDL))
    loop.sink.commit(token)  # it was delivered already
    filesystem, directory = lake.filesystem_of(token.payload["directory"])
    assert filesystem.get_file_info(directory).type is fs.FileType.NotFound
    assert [r[0] for r in target.rows(False)] == [3]


def test_small_files_are_folded_when_there_are_many(
    spark: Any, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake, "SMALL_FILES", 3)
    loop = started(target)
    for i in range(6):
        loop.deliver(i, i + 1, lambda i=i: spark.createDataFrame([(i, "a", None, 1)], DDL).coalesce(1))
    assert len(files(loop.sink)) <= 4
    assert sorted(r[0] for r in target.rows(False)) == list(range(6))


def test_a_writer_that_comes_between_is_noticed_and_nothing_is_lost(spark: Any, sink_world: SinkWorld) -> None:
    from deltalake import write_deltalake

    target = sink_world.target("delta")
    loop = started(target)
    loop.deliver(0, 1, lambda: spark.createDataFrame([(1, "a", None, 1), (2, "b", None, 1)], DDL))
    sink = loop.sink
    token = sink.write(sink.prepare(1, 2), spark.createDataFrame([(1, "ours", None, 1)], DDL))
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.decimal128(10, 2))])
    write_deltalake(target.options["path"], pa.table([[3], ["theirs"], [None]], schema=schema), mode="append")
    with pytest.raises(TransientError, match="SINK_TARGET_BUSY"):
        sink.commit(token)
    sink.abort(token)
    loop.deliver(1, 2, lambda: spark.createDataFrame([(1, "ours", None, 1)], DDL))
    assert sorted(r[:2] for r in target.rows(False)) == [(1, "ours"), (2, "b"), (3, "theirs")]


def test_a_column_of_the_targets_own_survives_the_rewriting(spark: Any, sink_world: SinkWorld) -> None:
    from deltalake import DeltaTable, write_deltalake

    target = sink_world.target("delta")
    rows = {
        "id": [1, 2],
        "name": ["a", "b"],
        "amount": pa.array([None, None], pa.decimal128(10, 2)),
        "note": ["x", "y"],
    }
    write_deltalake(target.options["path"], pa.table(rows))
    loop = started(target)
    loop.deliver(0, 1, lambda: spark.createDataFrame([(1, "new", None, 1), (3, "c", None, 1)], DDL))
    found = DeltaTable(target.options["path"]).to_pyarrow_table().sort_by("id").to_pylist()
    assert [(r["id"], r["name"], r["note"]) for r in found] == [(1, "new", None), (2, "b", "y"), (3, "c", None)]


def test_a_partitioned_target_is_a_clear_state(sink_world: SinkWorld) -> None:
    from deltalake import write_deltalake

    target = sink_world.target("delta")
    write_deltalake(target.options["path"], pa.table({"id": [1], "name": ["a"]}), partition_by=["name"])
    with pytest.raises(DefiniteError, match="SINK_TARGET_MISMATCH"):
        target.open(1).validate(COLUMNS, ("id",))


def test_a_column_that_was_retyped_is_a_clear_state_before_a_file_is_added(spark: Any, target: Target) -> None:
    from deltalake import write_deltalake
    from pyiceberg.types import DecimalType

    sink = target.open(1)
    loop = started(target)
    loop.deliver(0, 1, lambda: spark.createDataFrame([(1, "a", None, 1)], DDL))
    if target.options["connector"] == "delta":
        changed = pa.table({"id": [1], "name": ["a"], "amount": ["text"]})
        write_deltalake(target.options["path"], changed, mode="overwrite", schema_mode="overwrite")
    else:
        with sink.load().update_schema() as update:
            update.update_column("amount", DecimalType(20, 2))
    with pytest.raises(DefiniteError, match=r"SINK_TARGET_MISMATCH.* amount as"):
        loop.deliver(1, 2, lambda: spark.createDataFrame([(2, "b", None, 1)], DDL))
    with pytest.raises(DefiniteError, match=r"SINK_TARGET_MISMATCH.* amount as"):
        sink.validate(COLUMNS, ("id",))


def test_dates_and_times_that_python_has_not_are_delivered_and_merged(spark: Any, target: Target) -> None:
    kinds = {"day": "DATE", "at": "TIMESTAMP", "n": "INT"}
    columns = tuple(Column(name, kind) for name, kind in kinds.items())
    sink = target.open(1, columns=columns, key=("day",))
    sink.validate(columns, ("day",))
    loop = DeliveryLoop(sink)
    loop.start(None)
    far = "date_from_unix_date(2147483647) AS day, timestamp_micros(9223372036854775807L) AS at"
    early = "date_from_unix_date(-800000) AS day, timestamp_micros(-63113904000000000L) AS at"
    for epoch, n in enumerate((1, 2)):
        text = " UNION ALL ".join(f"SELECT {x}, {n} AS n, CAST(1 AS TINYINT) AS _op" for x in (far, early))
        loop.deliver(epoch, epoch + 1, lambda text=text: spark.sql(text))
    read = spark.read.parquet(*[f.url for f in sink.files(sink.load(), {})])
    assert [(r.n, r.c) for r in read.groupBy("n").agg(F.count("day").alias("c")).collect()] == [(2, 2)]


def test_a_key_that_is_null_is_merged_like_any_other(spark: Any, target: Target) -> None:
    columns = (Column("id", "BIGINT"), *COLUMNS[1:])
    sink = target.open(1, columns=columns)
    sink.validate(columns, ("id",))
    loop = DeliveryLoop(sink)
    loop.start(None)
    loop.deliver(0, 1, lambda: spark.createDataFrame([(None, "a", None, 1), (1, "b", None, 1)], DDL))
    loop.deliver(1, 2, lambda: spark.createDataFrame([(None, "c", None, 1)], DDL))
    assert sorted(target.rows(False), key=str) == [(1, "b", None), (None, "c", None)]
    loop.deliver(2, 3, lambda: spark.createDataFrame([(None, None, None, 2)], DDL))
    assert target.rows(False) == [(1, "b", None)]


def test_a_column_may_be_called_as_sparks_own_metadata(spark: Any, target: Target) -> None:
    columns = (Column("_id", "BIGINT"), Column("_metadata", "STRING"), Column("_file", "INT"))
    sink = target.open(1, columns=columns, key=("_id",))
    sink.validate(columns, ("_id",))
    loop = DeliveryLoop(sink)
    loop.start(None)
    ddl = "_id BIGINT, _metadata STRING, _file INT, _op TINYINT"
    loop.deliver(0, 1, lambda: spark.createDataFrame([(1, "a", 1, 1), (2, "b", 2, 1)], ddl))
    loop.deliver(1, 2, lambda: spark.createDataFrame([(2, "c", 3, 1)], ddl))
    read = spark.read.parquet(*[f.url for f in sink.files(sink.load(), {})])
    assert sorted(tuple(r) for r in read.select("_id", "_metadata", "_file").collect()) == [(1, "a", 1), (2, "c", 3)]
