"""A process that does not see the engine's own data directory makes nothing there."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.errors import TransientError, UsageError
from headwater.model.schema import Column, Schema
from headwater.spark.tasks import run_to_the_end
from headwater.storage.files import DataDir
from headwater.storage.location import data_directory
from headwater.storage.segments import read_segments, write_segment
from headwater.storage.shared import answer, take_answer, write_mark

SCHEMA = Schema((Column("id", "BIGINT"),), ("id",))
ROWS = pa.table({"id": pa.array([1, 2], pa.int64())})


def marked(root: Path) -> DataDir:
    root.mkdir(exist_ok=True)
    return DataDir(str(root), write_mark(root))


def test_with_the_engine_s_mark_rows_are_written_and_read(tmp_path: Path) -> None:
    data_dir = pickle.loads(pickle.dumps(marked(tmp_path / "data")))
    segment = write_segment(data_dir, 7, SCHEMA, ROWS, kind="base", vnode_count=4)
    assert read_segments(data_dir, SCHEMA, [segment.path]).num_rows == 2


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "the folder of an earlier engine"])
def test_a_host_without_the_engine_s_directory_is_named_and_makes_no_file(tmp_path: Path, there: str) -> None:
    root = tmp_path / "data"
    data_dir = marked(root)
    shutil.rmtree(root)
    if there != "nothing":
        root.mkdir()
    if there == "the folder of an earlier engine":
        write_mark(root)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TransientError, match=f"DATA_DIRECTORY_NOT_SHARED.*{socket.gethostname()}"):
        write_segment(data_dir, 7, SCHEMA, ROWS, kind="base", vnode_count=4)
    assert sorted(tmp_path.rglob("*")) == before


def test_folders_are_made_below_the_data_directory_and_never_up_to_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DataDir(str(tmp_path / "gone")).make("tables/1")
    DataDir(str(tmp_path)).make("tables/1/a")
    assert (tmp_path / "tables" / "1" / "a").is_dir()


def test_an_answer_counts_only_where_the_engine_sees_it(tmp_path: Path) -> None:
    here, elsewhere = marked(tmp_path / "here"), tmp_path / "elsewhere"
    answer(here.root, here.mark, "1")
    assert take_answer(Path(here.root), here.mark, "1")
    assert not take_answer(Path(here.root), here.mark, "1")
    shutil.copytree(here.root, elsewhere)
    answer(str(elsewhere), here.mark, "2")  # a copy of the directory has the mark, but nothing of it arrives
    assert not take_answer(Path(here.root), here.mark, "2")


def test_a_mark_of_another_engine_is_no_answer(tmp_path: Path) -> None:
    data_dir = marked(tmp_path)
    (tmp_path / "shared" / data_dir.mark).write_text("another")
    with pytest.raises(ValueError):
        answer(data_dir.root, data_dir.mark, "1")


def test_marks_of_engines_long_gone_are_removed_and_the_last_one_s_stays(tmp_path: Path) -> None:
    old, last = write_mark(tmp_path), write_mark(tmp_path)
    os.utime(tmp_path / "shared" / old, (0, 0))
    assert {p.name for p in (tmp_path / "shared").iterdir()} >= {old, last}
    newest = write_mark(tmp_path)
    assert {p.name for p in (tmp_path / "shared").iterdir()} == {last, newest}


def test_a_task_without_the_directory_fails_the_job_and_not_its_table() -> None:
    class Elsewhere:
        subject = 7

        def run(self):  # type: ignore[no-untyped-def]
            DataDir("/nowhere", "mark").path("tables")
            yield {}

    (result,) = run_to_the_end(Elsewhere())
    assert "error" not in result
    assert result["failed"]["code"] == "DATA_DIRECTORY_NOT_SHARED"


def test_a_relative_directory_is_made_absolute_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert data_directory("data") == tmp_path / "data"
    assert data_directory(Path("data")) == tmp_path / "data"
    assert data_directory("file:///srv/a%20b") == Path("/srv/a b")


@pytest.mark.parametrize("url", ["s3a://bucket/x", "s3://bucket", "hdfs://host/x", "gs://b", "file://host/x"])
def test_a_url_that_cannot_serve_is_refused_with_a_hint(url: str) -> None:
    with pytest.raises(UsageError, match="DATA_DIRECTORY_UNSUPPORTED") as caught:
        data_directory(url)
    assert "file:///path" in caught.value.hint
