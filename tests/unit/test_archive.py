"""Whether a JVM is told of the archive of Spark's classes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headwater.spark.archive import archive_path, java_options


def test_a_jvm_is_given_the_archive_of_its_java_only_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert java_options("one") == []
    archive_path("one").parent.mkdir(parents=True)
    archive_path("one").touch()
    assert f"-XX:SharedArchiveFile={archive_path('one')}" in java_options("one")
    assert java_options("another") == []


def test_a_path_that_cannot_stand_in_an_option_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "with blank"))
    archive_path("one").parent.mkdir(parents=True)
    archive_path("one").touch()
    assert java_options("one") == []
