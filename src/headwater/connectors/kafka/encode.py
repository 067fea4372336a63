"""Messages of the Kafka sink: changes as keys and values, encoded column-wise by Spark tasks into staged Arrow files.

    format      key                      value of an upsert                         value of a delete
    json        JSON object of the key   JSON object of the row                     none (a tombstone)
    avro        Avro record of the key   Avro record of the row (`avro.py`)         none (a tombstone)
    debezium    JSON object of the key   {"before": null, "after": row,             {"before": key, "after": null,
                                          "op": "u", "source": …, "ts_ms": …}        "op": "d", …}, then a tombstone

An append-only sink without a key sends messages without one; its Debezium operation is "c". A batch holds net
changes, so it cannot say whether an upsert was an insert; "u" with an empty `before` is what Debezium itself sends for
a Postgres table without full replica identity.

Staged files: Arrow IPC, columns `key` and `value` (large binary), both nullable; one file per slice (`slice_of`). A
tombstone is in a later record batch than the message that it follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from headwater.connectors.kafka.avro import encode_rows
from headwater.errors import DefiniteError
from headwater.model.schema import OP, OP_DELETE
from headwater.sink.dead_letters import DeadLetters
from headwater.sink.encode import json_rows
from headwater.storage.private import make_file

FORMATS: Final = ("json", "avro", "debezium")
SLICE: Final = "_hw_slice"
# What a record adds to key and value at most, as the client counts it against message.max.bytes.
RECORD_OVERHEAD_BYTES: Final = 512
_MESSAGE: Final = pa.schema([pa.field("key", pa.large_binary()), pa.field("value", pa.large_binary())])


@dataclass(frozen=True, slots=True)
class Form:
    """How rows become messages: all that a task needs to know."""

    format: str
    names: tuple[str, ...]
    key: tuple[str, ...]
    label: str
    ts_ms: int
    strict: tuple[str, ...] = ()  # key columns that are never NULL
    key_prefix: bytes = b""
    value_prefix: bytes = b""
    max_bytes: int = 1_000_000


def encode_task(form: Form, directory: str, letters: str | None) -> Callable[[Iterator[Any], Any], dict[str, Any]]:
    """The task for `run_tasks`: encodes its batches into one Arrow file per slice."""

    def task(batches: Iterator[Any], info: Any) -> dict[str, Any]:
        stem = f"{directory}/{info.partition:05d}-{info.attempt}"
        staged = _Staged(stem)
        dead = DeadLetters(letters, info)
        for batch in batches:
            if batch.num_rows:
                staged.add(batch, form, dead)
        files = staged.close()
        return {"rows": staged.rows, "bytes": staged.bytes, "files": files, **dead.save()}

    return task


@dataclass(slots=True)
class _Staged:
    """The files of one task, by slice."""

    stem: str
    rows: int = 0
    bytes: int = 0
    _writers: dict[int, tuple[str, Any, Any]] = field(default_factory=dict)

    def add(self, batch: Any, form: Form, dead: DeadLetters) -> None:
        slices = batch.column(SLICE)
        for number in pc.unique(slices).to_pylist():
            part = batch.filter(pc.equal(slices, number))
            for messages in encode(part, form, dead):
                self._writer(int(number)).write_batch(messages)
                self.bytes += messages.nbytes
            self.rows += part.num_rows
        self.rows -= dead.taken()

    def _writer(self, number: int) -> Any:
        if number not in self._writers:
            path = f"{self.stem}-{number}.arrow"
            make_file(path)
            file = pa.OSFile(path, "wb")
            self._writers[number] = (path, file, pa.ipc.new_file(file, _MESSAGE))
        return self._writers[number][2]

    def close(self) -> dict[str, str]:
        for _, file, writer in self._writers.values():
            writer.close()
            file.close()
        return {str(number): path for number, (path, _, _) in self._writers.items()}


def encode(batch: Any, form: Form, dead: DeadLetters) -> list[Any]:
    """A batch of changes as batches of messages."""
    messages = _messages(_keys(batch, form), _values(batch, form))
    messages, batch = _fitting(messages, batch, form, dead)
    if form.format != "debezium" or not form.key:
        return [messages]
    gone = messages.column("key").filter(pc.equal(batch.column(OP), OP_DELETE))
    if len(gone) == 0:
        return [messages]
    return [messages, pa.RecordBatch.from_arrays([gone, pa.nulls(len(gone), pa.large_binary())], schema=_MESSAGE)]


def _keys(batch: Any, form: Form) -> Any:
    if not form.key:
        return pa.nulls(batch.num_rows, pa.string())
    if form.format == "avro":
        return encode_rows(batch, form.key, form.strict, form.key_prefix)
    return json_rows(batch, list(form.key))


def _values(batch: Any, form: Form) -> Any:
    deletes = pc.equal(batch.column(OP), OP_DELETE)
    if form.format == "avro":
        return pc.if_else(deletes, None, encode_rows(batch, form.names, form.strict, form.value_prefix))
    rows = json_rows(batch, list(form.names))
    if form.format == "json":
        return pc.if_else(deletes, None, rows)
    source = json.dumps({"connector": "headwater", "name": form.label, "ts_ms": form.ts_ms}, separators=(",", ":"))
    tail = f',"source":{source},"ts_ms":{form.ts_ms}}}'
    operation = "u" if form.key else "c"
    upserts = pc.binary_join_element_wise('{"before":null,"after":', rows, f',"op":"{operation}"', tail, "")
    if not form.key:
        return upserts
    before = json_rows(batch, list(form.key))
    gone = pc.binary_join_element_wise('{"before":', before, ',"after":null,"op":"d"', tail, "")
    return pc.if_else(deletes, gone, upserts)


def _fitting(messages: Any, batch: Any, form: Form, dead: DeadLetters) -> tuple[Any, Any]:
    """Without the messages that the client would refuse as too large: they are dead letters, or the end."""
    sizes = [pc.fill_null(pc.binary_length(messages.column(n)), 0) for n in ("key", "value")]
    fits = pc.less_equal(pc.add(*sizes), form.max_bytes - RECORD_OVERHEAD_BYTES)
    if pc.all(fits).as_py() in (True, None):
        return messages, batch
    if not dead.wanted:
        raise DefiniteError(
            "SINK_ROW_REFUSED",
            "a message is larger than properties.message.max.bytes",
            hint="raise it (and the topic's max.message.bytes), or set dead_letters='true'",
        )
    dead.add(batch.filter(pc.invert(fits)).drop_columns([SLICE]))
    return messages.filter(fits), batch.filter(fits)


def _messages(keys: Any, values: Any) -> Any:
    return pa.RecordBatch.from_arrays([_large(keys), _large(values)], schema=_MESSAGE)


def _large(texts: Any) -> Any:
    if pa.types.is_string(texts.type):
        texts = texts.cast(pa.large_string())
    return texts.cast(pa.large_binary())


def read_messages(files: Sequence[str]) -> Iterator[tuple[list[bytes | None], list[bytes | None]]]:
    """The staged messages as lists of keys and values, one record batch in memory at a time."""
    for path in files:
        with pa.memory_map(path, "rb") as file:
            reader = pa.ipc.open_file(file)
            for i in range(reader.num_record_batches):
                batch = reader.get_batch(i)
                yield batch.column("key").to_pylist(), batch.column("value").to_pylist()


def staged_exist(files: Sequence[str]) -> bool:
    return all(Path(f).exists() for f in files)
