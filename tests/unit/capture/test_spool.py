"""The spool's files: what is synced survives, what is not is cut off, and ranges can be decoded by themselves."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.capture import spool_format as fmt
from headwater.capture.spool import SpoolReader, SpoolWriter
from headwater.errors import DefiniteError, TransientError


def _transaction(writer: SpoolWriter, xid: int, end_lsn: int, *messages: bytes) -> None:
    writer.begin(xid)
    for message in messages:
        writer.append(end_lsn - 1, message)
    writer.commit(end_lsn, 1_000_000 + xid)


def _messages(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        size, _ = struct.unpack_from("<IQ", data, at)
        found.append(data[at + 12 : at + 12 + size])
        at += 12 + size
    return found


def _all(directory: Path, max_bytes: int = 1 << 20) -> list[bytes]:
    reader = SpoolReader(directory)
    return [m for r in reader.ranges(0, 1 << 62, max_bytes) for m in _messages(reader.read(r))]


@pytest.fixture
def writer(tmp_path: Path) -> SpoolWriter:
    writer = SpoolWriter(tmp_path)
    writer.initialise(10)
    return writer


def test_new_spool_has_no_position_until_it_is_given_one(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path)
    assert writer.durable_lsn is None and SpoolReader(tmp_path).durable_lsn() is None
    writer.initialise(10)
    with pytest.raises(DefiniteError):
        writer.initialise(11)
    writer.close()
    assert SpoolWriter(tmp_path).durable_lsn == 10


def test_position_counts_only_after_sync(writer: SpoolWriter) -> None:
    _transaction(writer, 1, 20, b"one")
    assert writer.durable_lsn == 10 and writer.dirty
    assert writer.sync() == 20
    writer.advance(25)
    assert writer.durable_lsn == 20 and writer.dirty
    assert writer.sync() == 25 and not writer.dirty


def test_what_was_not_synced_is_cut_off_by_the_next_writer(writer: SpoolWriter, tmp_path: Path) -> None:
    _transaction(writer, 1, 20, b"one")
    writer.sync()
    _transaction(writer, 2, 30, b"two")
    writer._flush_data()
    writer.close()
    with open(tmp_path / "000000000001.index", "ab") as index:
        index.write(b"torn")
    again = SpoolWriter(tmp_path)
    assert again.durable_lsn == 20
    _transaction(again, 2, 30, b"two")
    again.sync()
    assert _all(tmp_path) == [b"one", b"two"]


@pytest.mark.parametrize("damage", [0, 1, 8, 47, 48, 49, 95, 96, 97])
def test_index_torn_at_any_byte_leaves_the_records_before_it(writer: SpoolWriter, tmp_path: Path, damage: int) -> None:
    for i in range(3):
        _transaction(writer, i, 20 + i, b"x" * i)
    writer.sync()
    writer.close()
    path = tmp_path / "000000000001.index"
    os.truncate(path, path.stat().st_size - damage)
    whole = 3 - -(-damage // fmt.INDEX_DTYPE.itemsize)
    again = SpoolWriter(tmp_path)
    assert again.durable_lsn == (20 + whole - 1 if whole else 10)
    assert _all(tmp_path) == [b"x" * i for i in range(whole)]


def test_index_record_of_zeros_after_a_power_cut_is_not_believed(writer: SpoolWriter, tmp_path: Path) -> None:
    _transaction(writer, 1, 20, b"one")
    writer.sync()
    writer.close()
    with open(tmp_path / "000000000001.index", "ab") as index:
        index.write(b"\0" * fmt.INDEX_DTYPE.itemsize)
    assert SpoolWriter(tmp_path).durable_lsn == 20
    assert len(SpoolReader(tmp_path).transactions(0, 1 << 62)) == 1


def test_damaged_newest_position_gives_way_to_the_one_before(writer: SpoolWriter, tmp_path: Path) -> None:
    for lsn in (20, 30):
        writer.advance(lsn)
        writer.sync()
    writer.close()
    raw = bytearray((tmp_path / "position").read_bytes())
    newest = raw.index(struct.pack("<Q", 30))
    raw[newest] ^= 1
    (tmp_path / "position").write_bytes(raw)
    assert SpoolWriter(tmp_path).durable_lsn == 20


def test_rolled_back_transaction_leaves_nothing(writer: SpoolWriter, tmp_path: Path) -> None:
    _transaction(writer, 1, 20, b"one")
    writer.begin(2)
    writer.describe(ord("R"), 7, 21, b"relation")
    writer.append(21, b"half" * 1_000_000)
    writer.rollback()
    _transaction(writer, 2, 30, b"two")
    writer.sync()
    assert _all(tmp_path) == [b"one", b"two"]
    assert SpoolReader(tmp_path).relations_at(SpoolReader(tmp_path).ranges(20, 30, 1)[0]) == {}


def test_transaction_is_never_split_over_files(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, target_bytes=100)
    writer.initialise(0)
    for i in range(5):
        _transaction(writer, i, 10 + i, b"a" * 60, b"b" * 60)
    _transaction(writer, 9, 99, b"large" * 1000)
    writer.sync()
    index = SpoolReader(tmp_path).transactions(0, 1 << 62)
    assert index["file"].tolist() == [1, 2, 3, 4, 5, 6]
    assert (index["start"] == 0).all()


def test_transactions_are_found_by_position_over_files(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, target_bytes=50)
    writer.initialise(0)
    reader = SpoolReader(tmp_path)
    for i in range(1, 21):
        _transaction(writer, i, i * 10, b"m" * 30)
        writer.sync()
        assert reader.transactions(0, i * 10)["xid"].tolist() == list(range(1, i + 1))
    assert reader.transactions(50, 70)["xid"].tolist() == [6, 7]
    assert reader.transactions(55, 75)["xid"].tolist() == [6, 7]
    assert reader.transactions(200, 1000)["xid"].tolist() == []
    assert reader.transactions(0, 200)["commit_us"].tolist() == [1_000_000 + i for i in range(1, 21)]


def test_reader_does_not_remember_what_the_writer_may_still_cut_off(writer: SpoolWriter, tmp_path: Path) -> None:
    reader = SpoolReader(tmp_path)
    _transaction(writer, 1, 20, b"one")
    _transaction(writer, 2, 30, b"two")
    writer.sync()
    assert reader.transactions(0, 20)["xid"].tolist() == [1]
    writer.close()
    os.truncate(tmp_path / "000000000001.index", fmt.INDEX_DTYPE.itemsize)
    again = SpoolWriter(tmp_path)
    _transaction(again, 3, 31, b"other")
    again.sync()
    assert reader.transactions(0, 31)["xid"].tolist() == [1, 3]


def test_range_is_given_the_descriptions_that_are_valid_where_it_begins(writer: SpoolWriter, tmp_path: Path) -> None:
    for i, version in enumerate([b"v1", None, b"v2", None], start=1):
        writer.begin(i)
        writer.append(i, b"begin")
        if version:
            writer.describe(ord("R"), 7, i, version)
            writer.append(i, version)
        writer.commit(10 + i, 0)
    writer.sync()
    reader = SpoolReader(tmp_path)
    found = [reader.relations_at(r) for r in reader.ranges(0, 1 << 62, 1)]
    assert found == [{}, {7: b"v1"}, {7: b"v1"}, {7: b"v2"}]


def test_description_that_a_new_session_repeats_is_kept_once(writer: SpoolWriter, tmp_path: Path) -> None:
    writer.describe(ord("R"), 7, 5, b"same")
    writer.sync()
    size = (tmp_path / "relations").stat().st_size
    writer.close()
    again = SpoolWriter(tmp_path)
    again.describe(ord("R"), 7, 6, b"same")
    again.sync()
    assert (tmp_path / "relations").stat().st_size == size


def test_descriptions_of_a_transaction_that_was_cut_off_are_cut_off_too(writer: SpoolWriter, tmp_path: Path) -> None:
    writer.begin(1)
    writer.append(1, b"begin")
    writer.describe(ord("R"), 7, 1, b"early")
    writer.commit(20, 0)
    writer.sync()
    writer.close()
    os.truncate(tmp_path / "000000000001.index", 0)
    SpoolWriter(tmp_path).close()
    assert (tmp_path / "relations").stat().st_size == 0


def test_truncation_removes_whole_files_and_never_the_newest(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, target_bytes=1)
    writer.initialise(0)
    for i in range(1, 6):
        _transaction(writer, i, i * 10, b"m")
    writer.sync()
    reader = SpoolReader(tmp_path)
    assert reader.truncate_before(29) == 2 * (fmt.FRAME.size + 1)
    assert fmt.file_numbers(tmp_path) == [3, 4, 5]
    assert reader.transactions(0, 1 << 62)["xid"].tolist() == [3, 4, 5]
    reader.truncate_before(1 << 62)
    assert fmt.file_numbers(tmp_path) == [5] and fmt.file_numbers(tmp_path, "spool") == [5]
    writer.close()
    again = SpoolWriter(tmp_path, target_bytes=1)
    assert again.durable_lsn == 50
    _transaction(again, 6, 60, b"m")
    again.sync()
    assert fmt.file_numbers(tmp_path) == [5, 6]


def test_position_survives_a_crash_although_all_files_but_an_empty_new_one_were_truncated(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, target_bytes=1)
    writer.initialise(10)
    _transaction(writer, 1, 20, b"m")
    writer.begin(2)  # a long transaction opens the second file; meanwhile the first one is no longer needed
    writer.append(25, b"half")
    SpoolReader(tmp_path).truncate_before(20)
    writer.close()
    assert fmt.file_numbers(tmp_path) == [2]
    assert SpoolReader(tmp_path).durable_lsn() == 20
    assert SpoolWriter(tmp_path, target_bytes=1).durable_lsn == 20


def test_data_file_without_index_is_removed_by_the_next_writer(writer: SpoolWriter, tmp_path: Path) -> None:
    writer.close()
    (tmp_path / "000000000000.spool").write_bytes(b"orphan")
    SpoolWriter(tmp_path)
    assert not (tmp_path / "000000000000.spool").exists()


@pytest.mark.parametrize("gone", ["the last index", "all files"])
def test_spool_whose_newest_files_are_away_is_never_written_on(tmp_path: Path, gone: str) -> None:
    writer = SpoolWriter(tmp_path, target_bytes=1)
    writer.initialise(10)
    for i in range(1, 4):
        _transaction(writer, i, 10 + i * 10, b"x" * 10)
    writer.sync()
    writer.advance(50)
    writer.sync()
    writer.close()
    for path in tmp_path.glob("000000000003.index" if gone == "the last index" else "0*"):
        path.unlink()
    left = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(TransientError, match="SPOOL_MISSING"):
        SpoolWriter(tmp_path, complete_to=40)
    assert sorted(p.name for p in tmp_path.iterdir()) == left


def test_data_file_that_a_crash_left_before_its_index_is_made_again(writer: SpoolWriter, tmp_path: Path) -> None:
    _transaction(writer, 1, 20, b"one")
    writer.sync()
    writer.close()
    (tmp_path / "000000000002.spool").touch()
    SpoolWriter(tmp_path).close()
    assert not (tmp_path / "000000000002.spool").exists() and _all(tmp_path) == [b"one"]


def test_second_writer_is_refused(writer: SpoolWriter, tmp_path: Path) -> None:
    with pytest.raises(TransientError, match="SPOOL_IN_USE"):
        SpoolWriter(tmp_path)


def test_transaction_that_does_not_follow_the_last_one_is_refused(writer: SpoolWriter) -> None:
    _transaction(writer, 1, 20, b"one")
    with pytest.raises(DefiniteError, match="SPOOL_ORDER"):
        _transaction(writer, 2, 20, b"two")


def test_position_cannot_move_inside_a_transaction(writer: SpoolWriter) -> None:
    writer.begin(1)
    with pytest.raises(DefiniteError, match="SPOOL_ORDER"):
        writer.advance(100)


def test_file_shorter_than_its_index_says_is_reported_as_damaged(writer: SpoolWriter, tmp_path: Path) -> None:
    _transaction(writer, 1, 20, b"one")
    writer.sync()
    reader = SpoolReader(tmp_path)
    (range_,) = reader.ranges(0, 20, 100)
    os.truncate(tmp_path / "000000000001.spool", 3)
    with pytest.raises(DefiniteError, match="SPOOL_DAMAGED"):
        reader.read(range_)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=4), max_size=25),
    max_bytes=st.integers(1, 2000),
    target=st.integers(1, 1500),
)
def test_ranges_together_hold_everything_once_and_respect_their_size(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]], max_bytes: int, target: int
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    writer = SpoolWriter(directory, target_bytes=target)
    writer.initialise(0)
    expected = []
    for i, transaction in enumerate(sizes):
        messages = [bytes([i]) * size for size in transaction]
        expected += messages
        _transaction(writer, i, i + 1, *messages)
    writer.sync()
    reader = SpoolReader(directory)
    ranges = reader.ranges(0, 1 << 62, max_bytes)
    assert [m for r in ranges for m in _messages(reader.read(r))] == expected
    ends = np.array([r.last_lsn for r in ranges])
    assert (np.diff(ends) > 0).all()
    for r in ranges:
        assert r.size <= max_bytes or r.first_lsn == r.last_lsn
    writer.close()


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))


def test_frames_that_are_not_what_was_written_are_refused(tmp_path: Path, writer: SpoolWriter) -> None:
    _transaction(writer, 1, 20, b"one", b"more")
    _transaction(writer, 2, 30, b"two")
    writer.sync()
    _flip(tmp_path / "000000000001.spool", 14)
    reader = SpoolReader(tmp_path)
    with pytest.raises(DefiniteError, match="SPOOL_DAMAGED"):
        reader.read(reader.ranges(0, 30, 1 << 20)[0])
    assert _messages(reader.read(reader.ranges(20, 30, 1 << 20)[0])) == [b"two"]


def test_a_damaged_record_of_an_index_is_refused_by_whoever_reads_it(tmp_path: Path, writer: SpoolWriter) -> None:
    _transaction(writer, 1, 20, b"one")
    _transaction(writer, 2, 30, b"two")
    writer.sync()
    _flip(tmp_path / "000000000001.index", 0)
    with pytest.raises(DefiniteError, match="SPOOL_CORRUPT"):
        SpoolReader(tmp_path).transactions(0, 30)


@pytest.mark.parametrize(("file", "at"), [("index", 0), ("spool", None)])
def test_a_writer_does_not_cut_off_what_was_durable_before(
    tmp_path: Path, writer: SpoolWriter, file: str, at: int | None
) -> None:
    for number in range(1, 4):
        _transaction(writer, number, 10 + 10 * number, b"x" * 100)
    writer.sync()
    writer.close()
    path = tmp_path / f"000000000001.{file}"
    if at is None:
        os.truncate(path, path.stat().st_size - 50)
    else:
        _flip(path, at)
    with pytest.raises(DefiniteError, match="SPOOL_CORRUPT"):
        SpoolWriter(tmp_path, complete_to=40)
    SpoolWriter(tmp_path).close()  # what nobody was told of is cut off, and comes again


def test_a_spool_of_before_there_were_checksums_of_frames_is_read(tmp_path: Path, writer: SpoolWriter) -> None:
    _transaction(writer, 1, 20, b"one")
    writer.sync()
    path = tmp_path / "000000000001.index"
    raw = bytearray(path.read_bytes())
    raw[44:48] = bytes(4)
    path.write_bytes(bytes(raw))
    assert _all(tmp_path) == [b"one"]


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), max_size=12),
    per_file=st.integers(1, 200),
    after=st.integers(0, 13),
    upto=st.integers(0, 13),
    max_bytes=st.integers(1, 400),
)
def test_first_transactions_are_a_beginning_that_fits_or_a_single_one(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], per_file: int, after: int, upto: int, max_bytes: int
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    writer = SpoolWriter(directory, target_bytes=per_file)
    writer.initialise(10)
    for i, size in enumerate(sizes):
        _transaction(writer, i, 20 + 10 * i, b"x" * size)
        writer.sync()
    writer.close()
    reader = SpoolReader(directory)
    low, high = 10 + 10 * after, 10 + 10 * upto
    everything = reader.transactions(low, high)
    first, more = reader.first_transactions(low, high, max_bytes)
    bytes_ = (everything["end"] - everything["start"]).cumsum()
    fits = int((bytes_ <= max_bytes).sum())
    assert len(first) == (min(len(everything), max(1, fits)))
    assert first.tolist() == everything[: len(first)].tolist()
    assert more == (len(first) < len(everything))
    assert (
        reader.bytes_between(low, high)
        == SpoolReader(directory).bytes_between(low, high)
        == sum(sizes[after:upto]) + fmt.FRAME.size * len(everything)
    )


def test_first_of_a_long_backlog_costs_no_look_at_the_rest(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, target_bytes=100)
    writer.initialise(10)
    for i in range(50):
        _transaction(writer, i, 20 + 10 * i, b"x" * 60)
        writer.sync()
    writer.close()
    reader = SpoolReader(tmp_path)
    first, more = reader.first_transactions(10, 1 << 40, 150)
    assert len(first) == 2 and more
    assert len(reader._closed) <= 3
    assert reader.bytes_between(10, 1 << 40) == 50 * (fmt.FRAME.size + 60)
    assert len(reader._closed) <= 3


def test_a_file_that_is_not_there_is_another_error_than_a_damaged_one(tmp_path: Path, writer: SpoolWriter) -> None:
    _transaction(writer, 1, 20, b"one")
    writer.sync()
    reader = SpoolReader(tmp_path)
    (range_,) = reader.ranges(0, 20, 100)
    (tmp_path / "000000000001.spool").unlink()
    with pytest.raises(TransientError, match="SPOOL_MISSING"):
        reader.read(range_)


@pytest.mark.parametrize("gone", ["one in the middle", "all"])
def test_transactions_of_a_spool_that_is_not_there_are_never_passed_over(tmp_path: Path, gone: str) -> None:
    writer = SpoolWriter(tmp_path, target_bytes=1)
    writer.initialise(0)
    for i in range(1, 4):
        _transaction(writer, i, i * 10, b"x" * 10)
    writer.sync()
    writer.close()
    for path in tmp_path.glob("*" if gone == "all" else "000000000002.*"):
        path.unlink()
    with pytest.raises(TransientError, match="SPOOL_MISSING"):
        SpoolReader(tmp_path).transactions(0, 30)
    if gone != "all":
        with pytest.raises(TransientError, match="SPOOL_MISSING"):
            SpoolWriter(tmp_path)
        assert (tmp_path / "000000000003.spool").exists()
