"""Readers and the sweep: an epoch that somebody reads stays, and one that is gone is said to be."""

from __future__ import annotations

import gc
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.runtime import reading
from headwater.runtime.maintenance import Maintenance
from headwater.runtime.reading import Reading


class Frame:
    """Something that can be followed."""


class World:
    """A meta store of epochs 1 to 100, of which a sweep forgets all before its horizon."""

    def __init__(self) -> None:
        self.oldest = 1
        self.queries = SimpleNamespace(reading=Reading(self.committed_epoch))
        self.meta = self.parameters = self
        self.dataflow = SimpleNamespace(live_views=SimpleNamespace(states={}))

    def __getitem__(self, name: str) -> int:
        return -10_000_000  # retention: nothing is kept for its age

    def committed_epoch(self) -> int:
        return 100

    def pin_rows(self) -> dict[str, int]:
        return {}

    def last_epoch_before(self, epoch: int) -> int:
        return epoch

    def expire(self, horizon: int) -> list[str]:
        self.oldest = max(self.oldest, horizon)
        return []


def test_a_hold_moves_back_to_the_oldest_epoch_that_is_read_and_ends() -> None:
    found = Reading(lambda: 100)
    with found.hold() as hold:
        assert (hold.epoch, found.held()) == (100, [100])
        hold.back_to(7)
        hold.back_to(50)
        assert found.held() == [7]
    assert found.held() == []


def test_a_frame_holds_its_epoch_as_long_as_it_lives_and_a_little_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    found, frame = Reading(lambda: 100), Frame()
    hold = found.hold()
    hold.back_to(7)
    hold.follow(frame)
    assert found.held() == [7]
    del frame
    gc.collect()
    assert found.held() == [7]  # what was made of it may just begin to read
    monkeypatch.setattr(reading.time, "monotonic", lambda: 1e12)
    assert found.held() == []


def test_no_sweep_comes_between_a_reader_s_word_and_its_look() -> None:
    world = World()
    maintenance: Any = Maintenance(world)  # type: ignore[arg-type]
    gone: list[int] = []
    stop = threading.Event()

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            with world.queries.reading.hold() as hold:
                epoch = rng.randrange(1, 100)
                hold.back_to(epoch)
                if epoch < world.oldest:  # refused: EPOCH_NOT_AVAILABLE
                    continue
                for _ in range(20):
                    if epoch < world.oldest:
                        gone.append(epoch)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in readers:
        thread.start()
    for _ in range(3000):
        maintenance._expire()
        world.oldest = 1
    stop.set()
    for thread in readers:
        thread.join()
    assert gone == []
