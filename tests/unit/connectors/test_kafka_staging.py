"""Where the Kafka sink stages: in the data directory, apart for each sink, topic and generation."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.connectors.kafka.sink import KafkaSink
from headwater.model.schema import Column
from headwater.runtime.sink_worker import raw_options
from headwater.sink.registry import open_sink
from headwater.storage.files import DataDir

OPTIONS = {"connector": "kafka", "topic": "t", "properties.bootstrap.server": "127.0.0.1:1", "primary_key": "id"}
COLUMNS = (Column("id", "BIGINT", nullable=False),)


def made(root: Path, name: str = "s", topic: str = "t", generation: int = 3) -> KafkaSink:
    options = {**OPTIONS, "topic": topic, "staging.path": str(root)}
    sink = open_sink(name, options, COLUMNS, ("id",), generation, str)
    assert isinstance(sink, KafkaSink)
    return sink


def options_in(directory: Path, **options: str) -> dict[str, str]:
    core: Any = SimpleNamespace(data_dir=DataDir(str(directory)), local_dir=directory)
    job: Any = SimpleNamespace(spec={"options": {**OPTIONS, **options}})
    return raw_options(core, job)


def test_an_engine_gives_a_folder_of_its_data_directory_unless_one_is_named(tmp_path: Path) -> None:
    assert options_in(tmp_path)["staging.path"] == str(tmp_path / "staging" / "sinks")
    assert options_in(tmp_path, **{"staging.path": "/elsewhere"})["staging.path"] == "/elsewhere"


def test_what_a_newer_engine_or_another_sink_stages_is_left_alone(tmp_path: Path) -> None:
    ours = made(tmp_path)
    others = [made(tmp_path, generation=4), made(tmp_path, name="s-t"), made(tmp_path, topic="t-3")]
    staged = {}
    for sink in (made(tmp_path, generation=2), ours, *others):
        folder = sink._staging / str(sink.generation) / "attempt"
        folder.mkdir(parents=True)
        staged[(sink.name, sink.topic, sink.generation)] = folder
    ours._remove_stale()
    assert [key for key, folder in staged.items() if folder.exists()] == [
        ("s", "t", 4),
        ("s-t", "t", 3),
        ("s", "t-3", 3),
    ]


@pytest.mark.parametrize("name", ["../../home/victim/data", "..", "/etc", "a/b"])
def test_a_name_does_not_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    for sink in (made(tmp_path / "staging", name=name), made(tmp_path / "staging", topic=name)):
        assert sink._staging.resolve().parent.parent == tmp_path / "staging"


def test_without_an_engine_it_is_a_private_folder_of_the_user(tmp_path: Path) -> None:
    sink = open_sink("s", OPTIONS, COLUMNS, ("id",), 1, str)
    assert isinstance(sink, KafkaSink)
    assert stat.S_IMODE(sink._staging.parent.parent.stat().st_mode) == 0o700
