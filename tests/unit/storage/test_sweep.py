"""What is left behind in a data directory, and goes: folders of runs, of dropped tables, of engines that crashed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.storage.files import DataDir, segment_folder, segment_path
from headwater.storage.sweep import Sweep


@pytest.fixture
def data_dir(tmp_path: Path) -> DataDir:
    return DataDir(str(tmp_path))


def write(data_dir: DataDir, path: str) -> str:
    file = Path(data_dir.root) / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x")
    return path


def present(data_dir: DataDir) -> set[str]:
    root = Path(data_dir.root)
    return {str(p.relative_to(root)) for p in root.rglob("*")}


def test_the_folder_of_a_run_goes_with_its_last_file(data_dir: DataDir) -> None:
    folder = segment_folder(1)
    first, second = (write(data_dir, segment_path(1, folder)) for _ in range(2))
    data_dir.delete([first])
    assert present(data_dir) == {"tables", "tables/1", folder, second}
    data_dir.delete([second, segment_path(1, folder)])
    assert present(data_dir) == {"tables", "tables/1"}  # other runs of the table may be about to write there


def test_a_sweep_removes_what_nothing_refers_to_and_nothing_else(data_dir: DataDir) -> None:
    mixed, dead, empty = segment_folder(1), segment_folder(1), segment_folder(2)
    known = {write(data_dir, segment_path(1)), write(data_dir, segment_path(1, mixed))}
    for path in (segment_path(1), segment_path(1, mixed), segment_path(1, dead), segment_path(9), "control/9.json"):
        write(data_dir, path)
    write(data_dir, "staging/reads/abc/1.claim")
    write(data_dir, "cache/x/y")
    data_dir.make(empty)
    sweep = Sweep(data_dir, known, {1, 2})
    late = write(data_dir, segment_path(1))  # of the engine that has just started
    write(data_dir, "control/1.json")
    assert not sweep.some(1000)
    folders = {"tables", "tables/1", mixed, "tables/2", "control"}
    assert present(data_dir) == known | folders | {late, "control/1.json"}


def test_many_empty_folders_of_an_older_build_are_removed_a_part_at_a_time(data_dir: DataDir) -> None:
    count = 300
    for _ in range(count):
        data_dir.make(segment_folder(3))
    sweep = Sweep(data_dir, set(), set())
    assert sweep.some(100)
    assert len(list((Path(data_dir.root) / "tables/3").iterdir())) == count - 100
    while sweep.some(1000):
        pass
    assert present(data_dir) == {"tables"}  # table 3 was dropped long ago
