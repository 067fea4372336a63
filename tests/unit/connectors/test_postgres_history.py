"""What a server must send again before its log counts as the one that we have read."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.capture.spool import SpoolReader, SpoolWriter
from headwater.connectors.postgres.history import CHECKED_BYTES, History
from headwater.errors import SourceError

FAR = 10 * CHECKED_BYTES


def spool(directory: Path, ends: list[int], *, target_bytes: int = 1 << 20) -> Path:
    """Transaction number i ends at ends[i], with the xid i and the commit time 100 i."""
    writer = SpoolWriter(directory, target_bytes=target_bytes)
    writer.initialise(0)
    for number, end in enumerate(ends):
        writer.begin(number)
        writer.append(end, b"I" * 100)
        writer.commit(end, 100 * number)
    writer.sync()
    writer.close()
    return directory


def test_the_same_transactions_sent_again_are_accepted(tmp_path: Path) -> None:
    history = History.of_spool(spool(tmp_path, [10, 20, 30]), 35, confirmed=10, begin=0)
    assert (history.start, history.is_ours) == (10, False)
    history.sent_again(20, 1, 100)
    history.sent_again(30, 2, 200)
    history.reached(34)
    assert not history.is_ours
    history.reached(35)
    assert history.is_ours


@pytest.mark.parametrize("sent", [(20, 7, 100), (20, 1, 101), (25, 1, 100), (40, 9, 900)])
def test_a_transaction_that_we_do_not_have_is_of_another_log(tmp_path: Path, sent: tuple[int, int, int]) -> None:
    history = History.of_spool(spool(tmp_path, [10, 20, 30]), 35, confirmed=10, begin=0)
    with pytest.raises(SourceError, match="SOURCE_RESTORED"):
        history.sent_again(*sent)


def test_a_transaction_that_is_not_sent_again_is_missing_there(tmp_path: Path) -> None:
    history = History.of_spool(spool(tmp_path, [10, 20, 30]), 35, confirmed=10, begin=0)
    history.sent_again(20, 1, 100)
    with pytest.raises(SourceError, match="SOURCE_RESTORED"):
        history.reached(50)


def test_a_slot_that_stands_where_we_are_has_nothing_to_send_again(tmp_path: Path) -> None:
    assert History.of_spool(spool(tmp_path, [10, 20]), 20, confirmed=20, begin=0).is_ours


def test_a_slot_far_behind_sends_again_only_the_last_part(tmp_path: Path) -> None:
    ends = [10, FAR, FAR + 10, FAR + 20]
    history = History.of_spool(spool(tmp_path, ends), FAR + 20, confirmed=0, begin=0)
    # The first one that is checked may begin before the place that was reckoned out: the stream begins at its end.
    assert history.start == FAR
    history.sent_again(10, 77, 77)  # a backlog is sent from where the slot stands
    history.sent_again(FAR + 10, 2, 200)
    history.sent_again(FAR + 20, 3, 300)
    history.reached(FAR + 20)
    assert history.is_ours


def test_what_was_cut_off_the_spool_is_not_asked_for(tmp_path: Path) -> None:
    directory = spool(tmp_path, [10, 20, 30, 40], target_bytes=150)
    assert SpoolReader(directory).truncate_before(20) > 0
    history = History.of_spool(directory, 40, confirmed=5, begin=0)
    assert history.start == 30
    history.sent_again(40, 3, 300)
    history.reached(40)
    assert history.is_ours
