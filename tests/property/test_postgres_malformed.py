"""Nothing that a server sends makes a decoder read or write beyond its arrays: damaged frames, in checked mode.

`tests/fuzz_postgres.py` has the decoders and the damage. It runs in a process of its own, whose compiled code checks
every access; the usual code does not, and its cache must not be used.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headwater.connectors.postgres import rowreader
from headwater.connectors.postgres.rowreader import _RawRows, _strip_frames
from headwater.errors import TransientError

FUZZ = Path(__file__).parents[1] / "fuzz_postgres.py"


def checked(cache: Path, *arguments: str, within: float) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_OPT": "0", "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=within)


def fuzzed(seed: int, seconds: float, cache: Path) -> str:
    done = checked(cache, str(FUZZ), str(seed), str(seconds), within=seconds + 300)
    assert done.returncode == 0, f"seed {seed}\n{done.stderr[-3000:]}"
    return done.stdout


def test_damaged_frames_are_refused_or_decoded_and_never_read_beyond_their_end(tmp_path: Path) -> None:
    told = fuzzed(20261118, 3, tmp_path)
    assert told.count("refused") == 11


@pytest.mark.slow
def test_damaged_frames_of_a_new_seed_are_refused_or_decoded(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    print(fuzzed(seed, 120, tmp_path))


@pytest.mark.slow
def test_rows_are_decoded_placed_and_packed_within_their_arrays(tmp_path: Path) -> None:
    """The tests of the same compiled code that hold what it gives, in checked mode."""
    names = ("test_postgres_wire_rows", "test_postgres_decoding", "test_placing", "test_parquet_pages")
    files = [str(Path(__file__).with_name(f"{name}.py")) for name in names]
    done = checked(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, within=1200)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("length", range(4))
def test_frame_that_is_shorter_than_its_own_length_moves_nothing(length: int) -> None:
    data = np.frombuffer(b"d" + struct.pack("!I", length) + b"d" + struct.pack("!I", 8) + b"ATTA", np.uint8)
    out = np.zeros(64, np.uint8)
    assert _strip_frames(data, 0, data.size, ord("d"), out, 0) == (0, 0)
    assert not out.any()


class Wire:
    """Gives one piece, and then nothing for as long as it is asked to wait."""

    def __init__(self, data: bytes) -> None:
        self.data, self.given_up = data, False

    def receive(self, room: memoryview, wait_ms: int, patience_s: float) -> int:
        if not self.data:
            assert patience_s <= rowreader.STALLED_S
            raise TimeoutError
        data, self.data = self.data, b""
        room[: len(data)] = data
        return len(data)

    def give_up(self) -> None:
        self.given_up = True


@pytest.mark.parametrize("frame", [b"d", b"E"])
@pytest.mark.parametrize("length", [0, 3, (1 << 30) + 1, (1 << 32) - 1])
def test_length_that_cannot_be_gives_the_connection_up(frame: bytes, length: int) -> None:
    wire = Wire(frame + struct.pack("!I", length) + b"rest")
    rows = _RawRows(None, 64, ord("d"), wire)  # type: ignore[arg-type]
    with pytest.raises(TransientError, match="a message says that it has"):
        rows.next_block()
    assert wire.given_up


def test_rest_of_a_message_that_never_comes_is_not_waited_for_without_end() -> None:
    wire = Wire(b"d" + struct.pack("!I", 1000) + b"all that there is")
    rows = _RawRows(None, 64, ord("d"), wire)  # type: ignore[arg-type]
    with pytest.raises(TransientError, match="the rest of a message does not come"):
        rows.next_messages(1000, lambda _: None)
    assert wire.given_up
