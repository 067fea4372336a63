"""pgoutput messages and spool frames, without a server: what is malformed is refused, never read beyond."""

from __future__ import annotations

import dataclasses
import struct

import pytest

from headwater.connectors.postgres.pgoutput import (
    StreamScanner,
    TransactionBegin,
    TransactionEnd,
    decode_events,
    decode_range,
    layouts,
    scan_frames,
    spool_frame,
)
from headwater.connectors.postgres.shape import Relation, RelationColumn, parse_relation
from headwater.connectors.postgres.types import ColumnPlan, Kind
from headwater.errors import DefiniteError

BEGIN = b"B" + struct.pack("!QqI", 100, 0, 7)
COMMIT = b"C" + struct.pack("!BQQq", 0, 100, 108, 0)
RELATION = (
    b"R" + struct.pack("!I", 5) + b"public\0t\0d" + struct.pack("!H", 2)
    + b"\x01id\0" + struct.pack("!Ii", 23, -1) + b"\x00v\0" + struct.pack("!Ii", 25, -1)
)  # fmt: skip
T = Relation(5, "public", "t", "d", (RelationColumn("id", 23, -1, True), RelationColumn("v", 25, -1, False)))
PLANS = [
    ColumnPlan("id", "INT", Kind.INT, key_position=0, type_oid=23),
    ColumnPlan("v", "STRING", Kind.TEXT, type_oid=25),
]
ROW = b"\0\2t\0\0\0\x012t\0\0\0\1x"
INSERT = b"I\0\0\0\5N" + ROW


def spool(*messages: bytes) -> bytes:
    return b"".join(spool_frame(i, m) for i, m in enumerate(messages, 1))


def test_relation_message_is_parsed() -> None:
    assert parse_relation(RELATION) == T


@pytest.mark.parametrize("message", [BEGIN, RELATION[:-1], RELATION[:8], b"R", RELATION + b"\0"])
def test_relation_message_that_is_none_is_refused(message: bytes) -> None:
    with pytest.raises(DefiniteError, match="SPOOL_CORRUPT"):
        parse_relation(message)


@pytest.mark.parametrize("message", [b"I\0\0\0\5K" + ROW, b"I\0\0\0\5N\0\2", b"U\0\0\0\5O" + ROW])
def test_row_message_without_the_row_that_it_must_have_is_refused(message: bytes) -> None:
    with pytest.raises(DefiniteError, match="SPOOL_CORRUPT"):
        decode_events(spool(BEGIN, message, COMMIT), T, PLANS)


def test_insert_is_decoded_with_its_transaction() -> None:
    batch = decode_events(spool(BEGIN, RELATION, INSERT, COMMIT), T, PLANS)
    assert batch.new.to_pydict() == {"id": [2], "v": ["x"]}
    assert (batch.xid.tolist(), batch.commit_end_lsn.tolist(), batch.order.tolist()) == ([7], [108], [4])
    assert batch.old.to_pydict() == {"id": [None]}


def test_columns_that_are_not_wanted_are_not_decoded() -> None:
    assert decode_events(spool(BEGIN, INSERT, COMMIT), T, PLANS[:1]).new.to_pydict() == {"id": [2]}


def test_empty_spool_has_no_events_but_the_schema() -> None:
    batch = decode_events(b"", T, PLANS)
    assert len(batch) == 0 and batch.new.schema.names == ["id", "v"]
    assert batch.changes().rows.num_rows == 0
    assert layouts(scan_frames(b""), T) == []


@pytest.mark.parametrize(
    "buf",
    [
        spool(BEGIN, COMMIT)[:-1],
        spool(BEGIN, COMMIT)[:5],
        spool(BEGIN),
        spool(COMMIT),
        spool(BEGIN, BEGIN, COMMIT),
        spool(INSERT),
        spool(BEGIN, b"S\0\0\0\0", COMMIT),
        spool(BEGIN[:9], COMMIT),
        spool(BEGIN, b"I\0\0", COMMIT),
    ],
)
def test_spool_that_is_not_whole_is_refused(buf: bytes) -> None:
    with pytest.raises(DefiniteError) as caught:
        scan_frames(buf)
    assert caught.value.code == "SPOOL_CORRUPT"


@pytest.mark.parametrize(
    "row", [INSERT[:-1], INSERT[:12], INSERT[:7], b"I\0\0\0\5X" + ROW, b"I\0\0\0\5N\0\2b\0\0\0\1xn"]
)
def test_row_that_is_malformed_is_refused(row: bytes) -> None:
    with pytest.raises(DefiniteError) as caught:
        decode_events(spool(BEGIN, row, COMMIT), T, PLANS)
    assert caught.value.code == "SPOOL_CORRUPT"


def test_row_with_another_number_of_columns_is_a_changed_schema() -> None:
    with pytest.raises(DefiniteError) as caught:
        decode_events(spool(BEGIN, b"I\0\0\0\5N\0\1n", COMMIT), T, PLANS)
    assert caught.value.code == "SOURCE_SCHEMA_CHANGED"


def test_column_of_another_type_is_a_changed_schema() -> None:
    other = ColumnPlan("v", "INT", Kind.INT, type_oid=23)
    with pytest.raises(DefiniteError, match="column v has another type"):
        decode_events(spool(BEGIN, INSERT, COMMIT), T, [PLANS[0], other])


@pytest.mark.parametrize("event", [b"D\0\0\0\5K\0\2nn", b"U\0\0\0\5K\0\2nnN" + ROW, b"D\0\0\0\5N" + ROW])
def test_event_without_the_old_key_is_refused(event: bytes) -> None:
    with pytest.raises(DefiniteError) as caught:
        decode_events(spool(BEGIN, event, COMMIT), T, PLANS)
    assert caught.value.code == "REPLICA_IDENTITY_MISSING"


def test_a_table_that_is_known_by_its_rows_is_not_helped_by_a_key() -> None:
    bare = [ColumnPlan("id", "INT", Kind.INT, type_oid=23), PLANS[1]]
    with pytest.raises(DefiniteError) as caught:
        decode_events(spool(BEGIN, b"U\0\0\0\5N" + ROW, COMMIT), T, bare)
    assert caught.value.code == "REPLICA_IDENTITY_MISSING"
    assert (
        caught.value.hint
        == "in the source: ALTER TABLE public.t REPLICA IDENTITY FULL, then resync; or DROP and CREATE it"
    )


@pytest.mark.parametrize("key", [(), ("v",), ("id", "v")])
def test_an_insert_under_another_key_is_refused_where_the_key_is_the_identity(key: tuple[str, ...]) -> None:
    columns = tuple(dataclasses.replace(c, key=c.name in key) for c in T.columns)
    with pytest.raises(DefiniteError) as caught:
        decode_events(spool(BEGIN, INSERT, COMMIT), dataclasses.replace(T, columns=columns), PLANS)
    assert caught.value.code == "SOURCE_KEY_CHANGED"
    full = dataclasses.replace(T, columns=columns, replica_identity="n")  # says nothing about the key
    assert len(decode_events(spool(BEGIN, INSERT, COMMIT), full, PLANS)) == 1


def test_relation_in_front_of_the_first_transaction_is_allowed() -> None:
    frames = scan_frames(spool(RELATION, BEGIN, INSERT, COMMIT))
    assert frames.transaction.tolist() == [-1, 0, 0, 0]
    assert layouts(frames, T) == [(T, 0, 4)]


def test_scanner_knows_the_open_transaction_and_the_last_relation() -> None:
    scanner = StreamScanner()
    assert scanner.feed(BEGIN) == TransactionBegin(7, 100) == scanner.open
    assert scanner.feed(RELATION) is None and scanner.feed(INSERT) is None
    assert scanner.relations == {5: RELATION}
    with pytest.raises(DefiniteError):
        scanner.feed(BEGIN)
    assert scanner.feed(COMMIT) == TransactionEnd(7, 100, 108, 946_684_800_000_000)
    assert scanner.open is None
    with pytest.raises(DefiniteError):
        scanner.feed(COMMIT)


def truncate(*oids: int) -> bytes:
    return b"T" + struct.pack(f"!IB{len(oids)}I", len(oids), 0, *oids)


WIDER = (
    RELATION.replace(struct.pack("!H", 2) + b"\x01id", struct.pack("!H", 3) + b"\x01id")
    + b"\x00w\0\0\0\0\x17"
    + b"\xff" * 4
)
WIDE_INSERT = b"I\0\0\0\5N\0\3t\0\0\0\x013t\0\0\0\1yn"


@pytest.mark.parametrize("window_bytes", [1, 40, 1 << 20])
def test_range_is_decoded_over_a_new_column_in_batches_of_any_size(window_bytes: int) -> None:
    frames = scan_frames(spool(BEGIN, INSERT, truncate(4, 5), COMMIT, BEGIN, WIDER, WIDE_INSERT, truncate(4), COMMIT))
    batches = list(decode_range(frames, 5, PLANS, initial=RELATION, window_bytes=window_bytes))
    assert [row for b in batches for row in b.new.to_pylist()] == [{"id": 2, "v": "x"}, {"id": 3, "v": "y"}]
    assert [o for b in batches for o in b.order.tolist()] == [2, 12]
    assert [o for b in batches for o in b.truncates.order.tolist()] == [4]


def test_range_without_a_message_of_the_table_has_no_batches() -> None:
    frames = scan_frames(spool(BEGIN, INSERT, COMMIT))
    assert list(decode_range(frames, 6, PLANS, initial=None)) == []
    assert list(decode_range(frames, 6, PLANS, initial=RELATION.replace(b"\5public", b"\6public"))) == []


def test_range_finds_its_first_relation_by_itself() -> None:
    (batch,) = decode_range(scan_frames(spool(BEGIN, RELATION, INSERT, COMMIT)), 5, PLANS, initial=None)
    assert batch.new.to_pydict() == {"id": [2], "v": ["x"]}


def test_old_shape_without_events_does_not_stop_a_table_that_was_captured_later() -> None:
    plans = [*PLANS, ColumnPlan("w", "INT", Kind.INT, type_oid=23)]
    frames = scan_frames(spool(BEGIN, truncate(5), COMMIT, BEGIN, WIDER, WIDE_INSERT, COMMIT))
    first, second = decode_range(frames, 5, plans, initial=RELATION)
    assert len(first) == 0 and first.truncates.order.tolist() == [2]
    assert second.new.to_pydict() == {"id": [3], "v": ["y"], "w": [None]}
    with pytest.raises(DefiniteError, match="column w is not in the stream"):
        list(decode_range(scan_frames(spool(BEGIN, INSERT, COMMIT)), 5, plans, initial=RELATION))
