"""Column decoding: faults are named and never show the value; the compiled code works without a place for its cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headwater.connectors.postgres import columns, textscan
from headwater.connectors.postgres.columns import decode_column
from headwater.connectors.postgres.types import ColumnPlan, Kind
from headwater.errors import DefiniteError

INTS = ColumnPlan("c", "ARRAY<INT>", Kind.ARRAY, element=ColumnPlan("c", "INT", Kind.INT))


def decode(plan: ColumnPlan, *texts: bytes | None) -> pa.Array:
    lengths = np.array([-1 if t is None else len(t) for t in texts], np.int64)
    starts = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0))])[:-1].astype(np.int64)
    return decode_column(plan, np.frombuffer(b"".join(t or b"" for t in texts), np.uint8), starts, lengths)


def plan(ddl: str, kind: Kind, precision: int = 0, scale: int = 0) -> ColumnPlan:
    return ColumnPlan("c", ddl, kind, precision=precision, scale=scale)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (plan("BOOLEAN", Kind.BOOL), b"true"),
        (plan("BOOLEAN", Kind.BOOL), b""),
        (plan("INT", Kind.INT), b""),
        (plan("INT", Kind.INT), b"-"),
        (plan("INT", Kind.INT), b"1x"),
        (plan("DOUBLE", Kind.FLOAT), b"one"),
        (plan("DECIMAL(5,2)", Kind.DECIMAL, 5, 2), b""),
        (plan("DECIMAL(5,2)", Kind.DECIMAL, 5, 2), b"."),
        (plan("DECIMAL(5,2)", Kind.DECIMAL, 5, 2), b"1.2.3"),
        (plan("DECIMAL(5,2)", Kind.DECIMAL, 5, 2), b"1e3"),
        (plan("BINARY", Kind.BYTES), b"\\000"),
        (plan("BINARY", Kind.BYTES), b"\\xAB"),
        (plan("BINARY", Kind.BYTES), b"\\x0"),
        (plan("DATE", Kind.DATE), b"01/02/2024"),
        (plan("DATE", Kind.DATE), b"2024-13-01"),
        (plan("DATE", Kind.DATE), b"2024-01-01 "),
        (plan("TIMESTAMP_NTZ", Kind.TIMESTAMP), b"2024-01-01"),
        (plan("TIMESTAMP_NTZ", Kind.TIMESTAMP), b"2024-01-01 00:00:00+00"),
        (plan("TIMESTAMP", Kind.TIMESTAMP), b"2024-01-01 00:00:00"),
        (plan("TIMESTAMP", Kind.TIMESTAMP), b"2024-01-01 00:00:00+0x"),
        (plan("TIMESTAMP", Kind.TIMESTAMP), b"2024-01-01 00:00:00 CET"),
        (INTS, b"1,2"),
        (INTS, b"{1"),
        (INTS, b'{"1}'),
        (INTS, b'{"1\\"}'),
        (INTS, b"{1}}"),
        (INTS, b"{1,}"),
    ],
)
def test_text_in_another_spelling_is_refused_and_not_shown(plan: ColumnPlan, text: bytes) -> None:
    with pytest.raises(DefiniteError) as caught:
        decode(plan, None, text)
    assert caught.value.code == "VALUE_MALFORMED" and "column c" in caught.value.message
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (plan("SMALLINT", Kind.INT), b"32768"),
        (plan("INT", Kind.INT), b"-2147483649"),
        (plan("BIGINT", Kind.INT), b"9223372036854775808"),
        (plan("BIGINT", Kind.INT), b"-9223372036854775809"),
        (plan("BIGINT", Kind.INT), b"99999999999999999999"),
        (plan("DECIMAL(5,2)", Kind.DECIMAL, 5, 2), b"1000.00"),
        (plan("DECIMAL(5,2)", Kind.DECIMAL, 5, 2), b"1.001"),
        (plan("DECIMAL(5,2)", Kind.DECIMAL, 5, 2), b"NaN"),
        (plan("DECIMAL(5,2)", Kind.DECIMAL, 5, 2), b"-Infinity"),
        (plan("TIMESTAMP", Kind.TIMESTAMP), b"294247-01-10 04:00:54.775807+00"),
        (plan("STRING", Kind.TEXT), b"\xff"),
        (INTS, b"{{1},{2}}"),
        (INTS, b"[0:0]={1}"),
    ],
)
def test_value_that_the_type_cannot_hold_is_refused(plan: ColumnPlan, text: bytes) -> None:
    with pytest.raises(DefiniteError) as caught:
        decode(plan, text)
    assert caught.value.code == "VALUE_NOT_REPRESENTABLE" and caught.value.hint


def test_column_without_rows_has_its_type() -> None:
    for kind in (plan("BOOLEAN", Kind.BOOL), plan("STRING", Kind.TEXT), plan("DOUBLE", Kind.FLOAT), INTS):
        array = decode(kind)
        assert len(array) == 0 and array.type == kind.arrow_type


def test_column_of_nulls_is_all_null() -> None:
    for kind in (plan("BINARY", Kind.BYTES), plan("DECIMAL(9,1)", Kind.DECIMAL, 9, 1), INTS):
        assert decode(kind, None, None).to_pylist() == [None, None]


def test_block_too_large_for_32_bit_offsets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_COLUMN_BYTES", 3)
    with pytest.raises(DefiniteError, match="more than 2 GiB"):
        decode(plan("STRING", Kind.TEXT), b"ab", b"cd")


def test_scanners_work_where_nothing_can_be_cached(tmp_path: Path) -> None:
    copy = tmp_path / "readonly"
    copy.mkdir()
    shutil.copy(textscan.__file__, copy / "scanners.py")
    (copy / "__pycache__").write_text("a file: numba cannot make its directory here, not even as root")
    program = (
        "import numpy as np, scanners as s; out = np.empty(1, np.int64); zero = np.zeros(1, np.int64);"
        "s.parse_ints(np.frombuffer(b'7', np.uint8), zero, zero + 1, 0, 9, out);"
        "print(out[0], type(s.parse_ints._cache).__name__)"
    )
    nowhere = str(copy / "__pycache__")
    environment = {**os.environ, "PYTHONPATH": str(copy), "HOME": nowhere, "XDG_CACHE_HOME": nowhere}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-B", "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "7 NullCache", done.stderr
