"""A mistake of ours that one table's changes meet stops that table, and no other (I10)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from headwater.errors import TransientError
from headwater.model.schema import Column, Schema
from headwater.spark import capture
from headwater.spark.capture import DecodeSpec, DecodeTables
from headwater.storage.files import DataDir

TABLE = DecodeSpec(
    table_id=1,
    oid=1,
    schema=Schema((Column("id", "BIGINT", nullable=False),), ("id",)),
    plans=(),
    bounds=(),
    after=(0,),
    snapshots=(None,),
    first_lsn=0,
    segments=(),
    seq_base=0,
)


def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, error: Exception) -> list[dict[str, Any]]:
    def result(one: Any) -> dict[str, Any]:
        if one.subject == 1:
            raise error
        return {"subject": one.subject, "captured": True}

    monkeypatch.setattr(capture._OneTable, "_result", result)
    tables = (TABLE, replace(TABLE, table_id=2))
    job = DecodeTables(data_dir=DataDir(str(tmp_path)), spool=str(tmp_path), ranges=(), tables=tables, vnode_count=256)
    return list(job.run())


def test_an_unforeseen_error_of_one_table_is_its_own_and_tells_no_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    failed, other = results(monkeypatch, tmp_path, OverflowError("secret 42"))
    assert (failed["subject"], failed["error"]["code"]) == (1, "DECODING_FAILED")
    assert "OverflowError" in failed["error"]["message"] and "secret" not in str(failed)
    assert other == {"subject": 2, "captured": True}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        FileNotFoundError("gone"),
        TransientError("SOURCE_UNREACHABLE", "away"),
        pa.ArrowInvalid("Parquet magic bytes not found in footer"),
    ],
)
def test_what_may_pass_or_be_put_back_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, error: Exception
) -> None:
    with pytest.raises(type(error)):
        results(monkeypatch, tmp_path, error)
