"""Text from files and stdin."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from headwater.cli.input import read_text
from headwater.errors import UsageError


def test_a_file_is_read_as_utf_8_without_its_mark(tmp_path: Path) -> None:
    (tmp_path / "a.sql").write_bytes("\ufeffSELECT 'é'".encode())
    assert read_text(tmp_path / "a.sql") == "SELECT 'é'"


def test_text_in_another_encoding_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.sql").write_bytes(b"SELECT '\xe9'")
    with pytest.raises(UsageError, match=r"a\.sql is not UTF-8"):
        read_text(tmp_path / "a.sql")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(UsageError, match="stdin is not UTF-8"):
        read_text(None)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nosuch"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_text(path)
