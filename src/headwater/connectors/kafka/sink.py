"""The Kafka sink: tasks encode messages in parallel into staged files, then tasks send them in transactions.

    write    one job: every partition encodes its rows column-wise (`encode.py`) under `staging.path`
    commit   one job: one task per producer sends the staged files

Both are done in the engine, by the same tasks, for rows that it holds already; other rows never pass through it.

`staging.path` must be reachable by the engine and by the executors. A Kafka transaction belongs to one producer.

*One producer* (every batch of changes): the messages and the progress record are one transaction; a reader with
`isolation.level=read_committed` sees all of the batch or nothing, so no source transaction is ever half there.

*Several producers* (the first, large batch: the snapshot; and all batches with `atomic='false'`): the rows are cut into
slices, by their vnode, or by a hash of the sink's key where that is not the table's. First the engine writes down its
intent (range, number of slices and how they are cut, an id) under the sink's own transactional id. Then each producer,
with a transactional id of its own, sends its slice and the record "slice n of this intent is sent" in one transaction.
When all have, the engine notes the epoch. Exactly once:
- a slice is in the topic if and only if its record is, and a task reads the record after `init_transactions`, which has
  ended whatever an earlier attempt had open: a slice is sent once, however often its task is run and by whom;
- a batch of which some slices are there is delivered again with the same range, the same number of slices and hence the
  same rows in each (`unfinished` tells the delivery), and the slices that are there are left out: they are not even
  read again, if they are of vnodes (`landed`). How many tasks send what is left does not matter;
- nobody begins another batch before that, and a replaced engine cannot write an intent: its transactional id is fenced.

Fencing: `claim` begins a transaction of the sink's own id, which makes a predecessor's producer useless, and writes its
generation. Whoever begins one later reads that: a higher generation means the end (SINK_FENCED). Consumer-group offsets
could carry the epoch too, but brokers forget those of an idle group after seven days.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from headwater.connectors.kafka import avro
from headwater.connectors.kafka.encode import FORMATS, SLICE, Form, encode_task, staged_exist
from headwater.connectors.kafka.registry import register
from headwater.connectors.kafka.transaction import INTENT, REQUEST_TIMEOUT_S, Place, Transaction, silent
from headwater.errors import DefiniteError, HeadwaterError, IndeterminateError, TransientError
from headwater.model.schema import VNODE, Column
from headwater.sink.base import BaseSink
from headwater.sink.dead_letters import letters_of
from headwater.sink.names import name_refused
from headwater.sink.options import Option, SinkOptions
from headwater.sink.sink import Token, Verdict, judge_progress
from headwater.storage.files import path_part
from headwater.storage.private import make_directory, temporary_directory

OPTIONS: Final = (
    Option("topic", required=True),
    Option("format", default="json", choices=FORMATS),
    Option("create_topic_if_not_exists", bool, default=True),
    Option("topic.partitions", int, default=-1),
    Option("topic.replication_factor", int, default=-1),
    Option("progress.topic", default="headwater_progress"),
    Option("staging.path"),
    Option("producers", int, default=4),  # of the snapshot; a broker takes far more
    Option("atomic", bool, default=True),  # a batch of changes is one transaction, hence one producer
    Option("schema.registry.url", url=True),
    Option("schema.registry.username"),
    Option("schema.registry.password", secret=True),
)
PROPERTY_PREFIX: Final = "properties."
BY_VNODE: Final = "vnode"
BY_KEY: Final = "key"  # also of intents that do not say it: an older release wrote them
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")  # as the broker has it
DEFAULT_MAX_BYTES: Final = 1_000_000  # the client's own default of message.max.bytes


class KafkaSink(BaseSink):
    """Produces one message per change, keyed; a delete is a tombstone."""

    wants_vnodes = True

    def __init__(
        self, name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int
    ) -> None:
        super().__init__(name, options, columns, key, generation)
        # Rows in memory are sent by one producer; a batch that is not to be atomic is cut into slices, by Spark.
        self.takes_rows = bool(options["atomic"])
        self.topic = options.text("topic")
        self.place = Place(options, name, generation)
        root = options["staging.path"] or temporary_directory("kafka")  # an engine gives a folder of its data directory
        self._staging = Path(root).absolute() / path_part(name) / path_part(self.topic)
        self._last: Any = None  # the batch that was written
        self._prefixes: tuple[bytes, bytes] | None = None

    def validate(self, columns: Sequence[Column], key: Sequence[str]) -> None:
        for topic in (self.topic, self.place.progress_topic):
            if not _TOPIC.fullmatch(topic) or topic in (".", ".."):
                raise name_refused("topic", topic, "a topic has letters, digits, '.', '_' and '-', at most 249")
        self.place.client_properties()
        self._create_topics()
        self._schemas()

    def claim(self) -> None:
        with Transaction(self.place) as transaction:
            stored = transaction.records.reached
            if stored is not None and stored.generation == self.generation:
                return
            epoch = stored.epoch if stored is not None else None
            transaction.begin().commit({**self._progress(epoch), **self._schema_records()})

    def prepare(self, from_epoch: int, to_epoch: int) -> Token:
        records = self.place.owned()
        token = self.token(from_epoch, to_epoch)
        self._remove_stale()
        intent: Mapping[str, Any] = {"id": token.attempt, "producers": self._producers(from_epoch), "by": ""}
        if records.unfinished and records.intent is not None:
            intent = records.intent
            if int(intent["to"]) != to_epoch:
                raise TransientError(
                    "SINK_OVERLAP",
                    f"the target of sink {self.name} already holds a part of the batch",
                    detail=f"begun up to epoch {intent['to']}, asked for {to_epoch}",
                )
        facts = {"intent": intent["id"], "producers": intent["producers"], "by": intent.get("by", BY_KEY)}
        return token.written(rows=0, directory=str(self._staging / str(self.generation) / token.attempt), **facts)

    def _remove_stale(self) -> None:
        """What earlier attempts staged. What a newer engine stages is not ours, whatever we believed when we looked."""
        for folder in self._staging.glob("*"):
            if folder.name.isdecimal() and int(folder.name) <= self.generation:
                shutil.rmtree(folder, ignore_errors=True)

    def write(self, token: Token, batch: Any) -> Token:
        from headwater.spark.sink import run_tasks, sliced

        self._last = batch
        make_directory(token.payload["directory"])
        task = encode_task(self._form(), token.payload["directory"], self.dead_letter_prefix(token))
        by = token.payload["by"] or (BY_VNODE if VNODE in batch.columns else BY_KEY)
        cut = (VNODE,) if by == BY_VNODE else self.key or self.column_names
        results = run_tasks(sliced(batch, cut, int(token.payload["producers"]), SLICE), task)
        files: dict[str, list[str]] = {}
        for result in results:
            for number, path in result["files"].items():
                files.setdefault(number, []).append(path)
        size = sum(r["bytes"] for r in results)
        return token.written(rows=self.rows_of(results), bytes=size, files=files, by=by, **letters_of(results))

    def commit(self, token: Token) -> None:
        if int(token.payload["producers"]) == 1:
            self._send(token, 1)
        else:
            self._commit_slices(token)
        shutil.rmtree(token.payload["directory"], ignore_errors=True)

    def last_committed(self) -> int | None:
        with Transaction(self.place, owner_only=False) as transaction:
            reached = transaction.records.reached
        return reached.epoch if reached is not None else None

    def unfinished(self) -> tuple[int, int] | None:
        """The range that must be delivered next and as it was, because a part of it is in the topic."""
        records = self.place.owned()
        if not records.unfinished or records.intent is None:
            return None
        return int(records.intent["from"]), int(records.intent["to"])

    def landed(self, vnode_count: int) -> frozenset[int]:
        """The vnodes whose part of the unfinished range is in the topic."""
        records = self.place.owned()
        if not records.unfinished or records.intent is None or records.intent.get("by") != BY_VNODE:
            return frozenset()
        slices, sent = int(records.intent["producers"]), records.sent
        return frozenset(v for v in range(vnode_count) if v % slices in sent)

    def reset(self, to_epoch: int | None) -> None:
        with Transaction(self.place) as transaction:
            transaction.begin().commit({**self._progress(to_epoch), self.place.key(INTENT): None})

    def abort(self, token: Token) -> None:
        shutil.rmtree(token.payload["directory"], ignore_errors=True)

    # -- committing -------------------------------------------------------------------------------------------------

    def _commit_slices(self, token: Token) -> None:
        """Several producers; from the intent on a failure leaves open what has landed."""
        facts = token.payload
        with Transaction(self.place) as transaction:
            records = transaction.records
            if judge_progress(records.reached, token) is Verdict.ALREADY:
                return
            if records.intent is None or records.intent["id"] != facts["intent"]:
                intent = {"id": facts["intent"], "from": token.from_epoch, "to": token.to_epoch}
                intent |= {"producers": facts["producers"], "by": facts["by"], "generation": self.generation}
                transaction.begin().commit({self.place.key(INTENT): intent})
        try:
            self._send(token, int(facts["producers"]))
            with Transaction(self.place) as transaction:
                done = {**self._progress(token.to_epoch), self.place.key(INTENT): None}
                transaction.begin().commit(done)
        except HeadwaterError as error:
            if error.code == "SINK_FENCED":
                raise
            message = f"not every producer of sink {self.name} could send its part"
            raise IndeterminateError("SINK_COMMIT_UNKNOWN", message, detail=f"{error.code} {error.detail}") from None

    def _send(self, token: Token, slices: int) -> None:
        from headwater.spark.sink import numbered_tasks, run_tasks

        numbers = numbered_tasks(slices, like=self._last)
        task = send_task(self.place, token, alone=slices == 1)
        run_tasks(numbers, task, at_most=max(1, int(self.options["producers"])), commits=True)

    def _progress(self, epoch: int | None) -> dict[bytes, Mapping[str, Any] | None]:
        return {self.place.key(): {"epoch": epoch, "generation": self.generation}}

    def _producers(self, from_epoch: int) -> int:
        return 1 if self.options["atomic"] and from_epoch > 0 else max(1, int(self.options["producers"]))

    # -- messages ---------------------------------------------------------------------------------------------------

    def _form(self) -> Form:
        key_prefix, value_prefix = self._schemas()
        return Form(
            format=self.options.text("format"),
            names=self.column_names,
            key=self.key,
            label=f"{self.name}:{self.topic}",
            ts_ms=int(time.time() * 1000),
            strict=self._strict(),
            key_prefix=key_prefix,
            value_prefix=value_prefix,
            max_bytes=int(self.options.properties.get("message.max.bytes", DEFAULT_MAX_BYTES)),  # type: ignore[arg-type]
        )

    def _strict(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.columns if c.name in self.key and not c.nullable)

    def _schema_texts(self) -> tuple[str, str]:
        keys = [c for c in self.columns if c.name in self.key]
        ordered = sorted(keys, key=lambda c: self.key.index(c.name))
        key = avro.schema_json(f"{self.topic}_key", ordered, self._strict())
        return key, avro.schema_json(self.topic, self.columns, self._strict())

    def _schemas(self) -> tuple[bytes, bytes]:
        """What comes before a key and a value; registers the schemas where there is a registry."""
        if self._prefixes is None and self.options["format"] == "avro":
            key, value = self._schema_texts()
            if self.options["schema.registry.url"]:
                value_id = register(self.options, f"{self.topic}-value", value)
                key_id = register(self.options, f"{self.topic}-key", key) if self.key else value_id
                self._prefixes = (avro.confluent_prefix(key_id), avro.confluent_prefix(value_id))
            else:
                self._prefixes = (avro.single_object_prefix(key), avro.single_object_prefix(value))
        return self._prefixes or (b"", b"")

    def _schema_records(self) -> dict[bytes, str]:
        if self.options["format"] != "avro" or self.options["schema.registry.url"]:
            return {}
        texts = self._schema_texts()
        return {
            self.place.key("schema", prefix[2:].hex()): text
            for prefix, text in zip(self._schemas(), texts, strict=True)
        }

    # -- topics -----------------------------------------------------------------------------------------------------

    def _create_topics(self) -> None:
        admin = AdminClient(self.place.client_properties(), logger=silent())
        with self.place.translated():
            existing = admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics
            replication = int(self.options["topic.replication_factor"])
            wanted = [
                NewTopic(self.topic, int(self.options["topic.partitions"]), replication),
                NewTopic(self.place.progress_topic, 1, replication, config={"cleanup.policy": "compact"}),
            ]
            missing = [t for t in wanted if t.topic not in existing]
            if self.topic not in existing and not self.options["create_topic_if_not_exists"]:
                message = f"there is no topic {self.topic}"
                hint = "create it, or add create_topic_if_not_exists='true'"
                raise DefiniteError("SINK_TARGET_MISSING", message, hint=hint)
            for future in (admin.create_topics(missing) if missing else {}).values():
                with _already_there():
                    future.result(REQUEST_TIMEOUT_S)


def send_task(place: Place, token: Token, *, alone: bool) -> Callable[[Iterator[Any], Any], dict[str, Any]]:
    """The task for `run_tasks` over the producers' numbers: sends the staged files of each number that it gets."""

    def task(batches: Iterator[Any], info: Any) -> dict[str, Any]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                files = token.payload["files"].get(str(number), [])
                _send_alone(place, token, files) if alone else _send_slice(place, token, int(number), files)
        return {"rows": 0}

    return task


def _send_alone(place: Place, token: Token, files: Sequence[str]) -> None:
    """The whole batch and the progress in one transaction of the sink's own id."""
    with Transaction(place) as transaction:
        if judge_progress(transaction.records.reached, token) is Verdict.ALREADY:
            return
        _check_staging(place, files)
        transaction.send(files)
        transaction.commit({place.key(): {"epoch": token.to_epoch, "generation": token.generation}})


def _send_slice(place: Place, token: Token, number: int, files: Sequence[str]) -> None:
    """One slice and the record that it is sent; slice 0 goes by producer 1, and so on."""
    intent = token.payload["intent"]
    with Transaction(place, number + 1) as transaction:
        records = transaction.records
        if records.slices.get(str(number + 1)) == intent:
            return
        if records.intent is None or records.intent["id"] != intent:
            # Someone has finished or reset this batch meanwhile.
            raise TransientError("SINK_OVERLAP", f"the batch of sink {place.sink} is no longer the one under way")
        _check_staging(place, files)
        transaction.send(files)
        transaction.commit({place.key(str(number + 1)): {"intent": intent}})


def _check_staging(place: Place, files: Sequence[str]) -> None:
    """Staging that is gone was removed by a successor, or by someone else."""
    if not staged_exist(files):
        place.owned()
        raise TransientError("SINK_STAGING_LOST", f"what sink {place.sink} had staged is gone")


@contextlib.contextmanager
def _already_there() -> Iterator[None]:
    try:
        yield
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise
