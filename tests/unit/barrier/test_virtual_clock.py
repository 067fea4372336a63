from __future__ import annotations

import asyncio
import time

import pytest

from headwater.testing.virtual_clock import NothingLeftToHappen, VirtualClockLoop, in_process, run


def test_thousands_of_seconds_pass_in_no_time() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(10)
        return asyncio.get_running_loop().time()

    before = time.process_time()
    assert run(main()) == pytest.approx(10_000)
    assert time.process_time() - before < 1.0


def test_a_seed_repeats_its_order_and_others_differ() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def step(number: int) -> None:
            await asyncio.sleep(0)
            order.append(number)

        await asyncio.gather(*(step(n) for n in range(10)))
        return order

    assert run(main(), seed=1) == run(main(), seed=1)
    assert len({tuple(run(main(), seed=s)) for s in range(10)}) > 5
    assert run(main()) == list(range(10))


def test_a_deadlock_is_an_error_and_not_silence() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingLeftToHappen):
        run(main())


def test_a_frozen_process_stands_still_and_goes_on_when_thawed() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        ticks: list[float] = []

        async def tick() -> None:
            while True:
                await asyncio.sleep(1)
                ticks.append(loop.time())

        in_process("p", tick())
        await asyncio.sleep(3.5)
        loop.freeze("p")
        await asyncio.sleep(100)
        assert len(ticks) == 3 and loop.is_frozen("p")
        loop.thaw("p")
        await asyncio.sleep(3.2)
        assert len(ticks) == 7 and ticks[3] == pytest.approx(103.5)

    run(main(), seed=3)


def test_nothing_of_a_killed_process_runs_not_even_its_clean_up() -> None:
    ended: list[str] = []

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)

        async def work() -> None:
            try:
                await asyncio.sleep(1)
            finally:
                ended.append("finally")

        task = in_process("p", work())
        await asyncio.sleep(0.5)
        loop.freeze("p")
        task.cancel()
        await asyncio.sleep(100)
        return list(ended)

    assert run(main(), seed=1) == []
    assert ended == ["finally"]  # the loop's own end
