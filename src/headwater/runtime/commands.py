"""Statements → actions of the engine. Each either happens completely or raises and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sqlglot import exp

from headwater.config import PARAMETERS, suggestion
from headwater.errors import UsageError
from headwater.model.barrier import Mutation, MutationKind
from headwater.model.epoch import MAX_EPOCH
from headwater.model.schema import Column, Schema, keyed, quoted
from headwater.model.trust import Trust
from headwater.runtime.catalogue import columns_of, moment
from headwater.runtime.registry import schema_of
from headwater.runtime.result import Result
from headwater.runtime.spelling import json_value
from headwater.runtime.trust import check_trust
from headwater.sql import statements as s
from headwater.sql.create import check_type, checked
from headwater.sql.parser import parse
from headwater.sql.reading import too_deep
from headwater.sql.whole_numbers import divide_whole_numbers
from headwater.storage.checkpoint import NO_STATES, Contribution, JobRow, States
from headwater.storage.files import control_file

if TYPE_CHECKING:
    from headwater.engine import EngineCore

READS: Final = (s.Query, s.Show, s.Describe, s.Explain, s.SetVariable)  # these change nothing
LONG_TEXT: Final = 256 << 10  # characters
_LONG_TEXTS: Final = threading.Lock()
_long_texts = 0  # being parsed now
WAIT_POLL_S: Final = 0.01  # a look takes microseconds
JOB_PROPERTIES: Final = {
    "table": ("BACKFILL_RATE_LIMIT", "PARALLELISM", "BACKFILL_PARALLELISM"),
    "view": ("BACKFILL_RATE_LIMIT", "PARALLELISM", "BACKFILL_PARALLELISM"),
    "sink": ("SINK_RATE_LIMIT", "BACKFILL_RATE_LIMIT"),
    "source": (),
}


class Commands:
    """See the head of this module."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._ddl = asyncio.Lock()
        self._last_id = 0
        self._under_way: set[asyncio.Future[Any]] = set()
        # What these change is committed together with the states that came with them.
        self._changes: dict[type[s.Statement], Callable[[Any, States], Awaitable[None]]] = {
            s.Insert: self._write,
            s.Update: self._write,
            s.Delete: self._write,
            s.Drop: self._drop,
            s.AlterJob: self._alter_job,
        }
        self._handlers: dict[type[s.Statement], Callable[[Any], Awaitable[Result | None]]] = {
            s.Query: self._query,
            s.CreateTable: self._create_table,
            s.CreateSource: self._create_source,
            s.CreateTableFrom: self._create_table_from,
            s.CreateView: self._create_view,
            s.CreateSink: self._create_sink,
            s.CreateFunction: self._create_function,
            s.AlterSystem: self._alter_system,
            s.SetVariable: self._set,
            s.Simple: self._simple,
            s.Maintain: self._maintain,
            s.Show: self._show,
            s.Describe: self._describe,
            s.CancelJobs: self._cancel,
            s.Explain: self._explain,
        }

    async def execute(
        self, text: str, states: States = NO_STATES, *, trust: Trust = Trust.OWNER
    ) -> list[Result | None]:
        """Run statements in order; the first that fails ends them. `states` are committed with what they change."""
        results: list[Result | None] = []
        async for statement in _parsed(text):
            check_trust(statement, trust, allow_code=self.core.allow_python)
            results.append(await self._run(statement, states))
        return results

    async def _run(self, statement: s.Statement, states: States) -> Result | None:
        try:
            self._divide(statement)
            return await self.run(statement, states)
        except RecursionError as error:  # while it was analysed: nothing has been made yet
            raise too_deep() from error

    async def frame(self, text: str) -> Any:
        """As `execute`, but a query at the end comes back as a DataFrame."""
        found = None
        async for statement in _parsed(text):
            found = None
            if isinstance(statement, s.Query):
                found = await self._divided_frame(statement)
            elif (result := await self._run(statement, NO_STATES)) is not None:
                found = await asyncio.to_thread(_result_frame, self.core.spark, result)
        return found

    async def _divided_frame(self, statement: s.Query) -> Any:
        try:
            self._divide(statement)
            return await self._frame(statement)
        except RecursionError as error:
            raise too_deep() from error

    def _divide(self, statement: s.Statement) -> None:
        """In a query of Postgres' dialect: what is divided there without a fraction."""

        def types_of(name: str) -> dict[str, str] | None:
            job = self.core.registry.get(name)
            columns = schema_of(job).visible if job is not None and job.kind in ("table", "view") else ()
            return {c.name.lower(): c.type.upper() for c in columns}

        inner = statement.inner if isinstance(statement, s.Explain) else statement
        if (query := getattr(inner, "query", None)) is not None:
            divide_whole_numbers(query, types_of)

    async def _frame(self, statement: s.Query) -> Any:
        await self.core.writes.settle()
        return await self.core.jobs.run("query", "query", lambda: self.core.queries.lasting_frame(statement.query))

    async def run(self, statement: s.Statement, states: States = NO_STATES) -> Result | None:
        """Cancelled, a statement that only reads ends; any other goes on to its end, and is never left half done."""
        if isinstance(statement, READS) or (isinstance(statement, s.Simple) and statement.verb == "WAIT"):
            return await self._carry_out(statement, states)
        await self.core.begun.wait()
        whole = asyncio.ensure_future(self._carry_out(statement, states))
        self._under_way.add(whole)
        whole.add_done_callback(self._ended)
        return await asyncio.shield(whole)

    def _ended(self, done: asyncio.Future[Any]) -> None:
        self._under_way.discard(done)
        if not done.cancelled():
            done.exception()  # whoever waited for it has it; if they have left, nobody wants it

    async def _carry_out(self, statement: s.Statement, states: States) -> Result | None:
        if (change := self._changes.get(type(statement))) is not None:
            await change(statement, states)
            return None
        return await self._handlers[type(statement)](statement)

    # -- reading and writing ----------------------------------------------------------------------------------------

    async def _query(self, statement: s.Query) -> Result:
        return await self.core.queries.run(statement.query)

    async def _write(self, statement: s.Statement, states: States) -> None:
        match statement:
            case s.Insert():
                await self.core.writes.insert(statement, states)
            case s.Update():
                await self.core.writes.update(statement, states)
            case s.Delete():
                await self.core.writes.delete(statement, states)

    # -- CREATE -----------------------------------------------------------------------------------------------------

    def exists(self, name: str, definition: str, if_not_exists: bool) -> bool:
        """Whether the object is there already; UsageError unless that is fine."""
        job = self.core.registry.get(name)
        if job is None:
            if name.lower() in ("hw_catalog", "hw_target") or name.lower().startswith("hw_bound_"):
                raise UsageError("RESERVED_NAME", f"{name} is a name of Headwater's own")
            return False
        if if_not_exists:
            return True
        raise UsageError("ALREADY_EXISTS", f"{job.kind} {job.name} exists already", hint=_drop_hint(job))

    async def add_job(self, row: JobRow, contribution: Contribution | None = None) -> int:
        contribution = contribution or Contribution()
        contribution.jobs_added.append(row)
        return await self.core.main.request(Mutation(MutationKind.ADD, row.id), contribution)

    async def _create_table(self, statement: s.CreateTable) -> None:
        async with self._ddl:
            if self.exists(statement.name, statement.text, statement.if_not_exists):
                return
            if "connector" in statement.options:
                await self.core.followed.create(statement)
                return
            if statement.options:
                name = next(iter(statement.options))
                raise UsageError("UNKNOWN_OPTION", f"CREATE TABLE has no option {name}")
            if statement.query is None:
                if not statement.columns:
                    raise UsageError("SQL_SYNTAX", "a table needs columns")
                await self.add_job(self._table_row(statement, keyed(statement.columns, statement.key)))
        if statement.query is not None:
            await self._create_table_as(statement, statement.query)

    def _table_row(self, statement: s.CreateTable, schema: Schema) -> JobRow:
        spec = {"schema": schema.as_dict(), "inputs": []}
        return self.row(statement.name, "table", "live", statement.text, spec)

    async def _create_table_as(self, statement: s.CreateTable, query: exp.Expression) -> None:
        """The rows are written first; table and rows become visible with one commit, or neither does."""
        schema = keyed(await self._query_columns(query), ())
        row = self._table_row(statement, schema)
        contribution = await self.core.writes.staged_query(row.id, schema, query)
        try:
            async with self._ddl:
                if self.exists(statement.name, statement.text, statement.if_not_exists):
                    self.core.forget_files(segment.path for segment in contribution.segments_added)
                    return
                await self.add_job(row, contribution)
        except UsageError:
            self.core.forget_files(segment.path for segment in contribution.segments_added)
            raise
        self.core.report_progress(row.id, rows=contribution.rows)
        self.core.count_rows({row.id: contribution.segments_added})

    async def _query_columns(self, query: exp.Expression) -> tuple[Column, ...]:
        frame = await self._frame(s.Query("", query))
        columns = []
        for field in frame.schema.fields:
            kind = field.dataType.simpleString()
            columns.append(Column(field.name, kind if "struct<" in kind else kind.upper()))
            check_type(field.name, "NULL without a type" if kind == "void" else kind)
        return checked(columns, [])[0]

    def row(
        self, name: str, kind: str, state: str, definition: str, spec: dict[str, Any], lane: str = "main"
    ) -> JobRow:
        # Several CREATE TABLE … AS may be writing at once: an id that was given and is not committed yet is taken.
        job_id = self._last_id = max(self.core.meta.next_job_id(), self._last_id + 1)
        return JobRow(job_id, name, kind, state, lane, definition, spec)

    async def _create_source(self, statement: s.CreateSource) -> None:
        async with self._ddl:
            if not self.exists(statement.name, statement.text, statement.if_not_exists):
                await self.core.capture.create_source(statement)

    async def _create_table_from(self, statement: s.CreateTableFrom) -> None:
        async with self._ddl:
            if not self.exists(statement.name, statement.text, statement.if_not_exists):
                await self.core.capture.create_table(statement)

    async def _create_view(self, statement: s.CreateView) -> None:
        async with self._ddl:
            if self.exists(statement.name, statement.text, statement.if_not_exists):
                return
            await self.core.writes.settle()
            job_id = await self.core.creating.create(statement)
        await self.core.creating.settle(job_id)

    async def _create_sink(self, statement: s.CreateSink) -> None:
        async with self._ddl:
            if not self.exists(statement.name, statement.text, statement.if_not_exists):
                await self.core.delivery.create(statement)

    async def _create_function(self, statement: s.CreateFunction) -> None:
        async with self._ddl:
            await self.core.functions.create(statement)

    # -- DROP, ALTER ------------------------------------------------------------------------------------------------

    async def _drop(self, statement: s.Drop, states: States) -> None:
        async with self._ddl:
            if statement.kind == "function":
                await self.core.functions.drop(statement)
                return
            job = self.core.registry.get(statement.name)
            if job is None and statement.if_exists:
                return
            job = self.core.registry.find(statement.name, statement.kind)
            await self.drop(job, cascade=statement.cascade, states=states)

    async def drop(self, job: JobRow, *, cascade: bool, states: States = NO_STATES) -> None:
        dependants = self.core.registry.all_dependants(job.id)
        if dependants and not cascade:
            names = ", ".join(d.name for d in dependants)
            raise UsageError(
                "DEPENDANTS_EXIST",
                f"{job.kind} {job.name} is used by {names}",
                hint=f"drop them first, or DROP {job.kind.upper()} {job.name} CASCADE",
            )
        jobs = [*reversed(dependants), job]
        jobs += [view for sink in jobs for view in self.core.delivery.hidden_inputs(sink)]
        for one in jobs:
            await self.core.creating.cancel(one)
            await self.core.delivery.drop(one)
        extra = await self.core.capture.drop(jobs)
        contribution = Contribution(jobs_dropped=[j.id for j in jobs], states=dict(states))
        await self.core.main.request(Mutation(MutationKind.DROP, job.id), contribution)
        for one in jobs:
            self.core.job_progress.pop(one.id, None)
            self.core.counters.forget(one.name)
        self.core.forget_files(control_file(one.id) for one in jobs)
        await extra()

    async def _cancel(self, statement: s.CancelJobs) -> None:
        async with self._ddl:
            for job_id in statement.ids:
                job = self.core.registry.by_id.get(job_id)
                if job is None:
                    raise UsageError("UNKNOWN_JOB", f"there is no job {job_id}", hint="SHOW JOBS lists them")
                if job.state != "creating":
                    raise UsageError("NOT_CREATING", f"{job.kind} {job.name} is not being created", hint="DROP it")
                if job.live_epoch < MAX_EPOCH:  # a resync: to cancel is to drop, and the table with its rows is wanted
                    what = f"{job.kind} {job.name} is there already, and is only copied again"
                    raise UsageError("NOT_CREATING", what, hint="wait until it is live, or DROP it")
                await self.drop(job, cascade=False)

    async def _alter_job(self, statement: s.AlterJob, states: States) -> None:
        job = self.core.registry.find(statement.name, statement.kind)
        known = JOB_PROPERTIES[job.kind]
        if statement.property not in known:
            raise UsageError(
                "UNKNOWN_PROPERTY", f"{job.kind} has no property {statement.property}", hint=suggestion("", known)
            )
        if job.kind == "table" and not job.spec.get("captured"):
            raise UsageError(
                "NOT_CAPTURED",
                f"table {job.name} is not captured from a source: nothing of it is copied",
                hint=f"{statement.property} is for tables FROM a source, and for views",
            )
        value = _limit(statement.property, statement.value)
        settings = dict(job.spec.get("settings", {}))
        settings[statement.property.lower()] = value
        kind = MutationKind.RESCALE if "PARALLELISM" in statement.property else MutationKind.THROTTLE
        patch = {job.id: {"spec_patch": {"settings": settings}}}
        contribution = Contribution(job_updates=patch, states=dict(states))
        await self.core.main.request(Mutation(kind, job.id), contribution)
        self.core.settings_changed(job.id)

    async def _alter_system(self, statement: s.AlterSystem) -> None:
        self.core.parameters.set(statement.name, statement.value)

    async def _set(self, statement: s.SetVariable) -> None:
        if statement.name != "dialect":
            raise UsageError("UNKNOWN_VARIABLE", f"there is no variable {statement.name}", hint="SET dialect = 'spark'")

    # -- the rest ---------------------------------------------------------------------------------------------------

    async def _simple(self, statement: s.Simple) -> None:
        match statement.verb:
            case "PAUSE" | "RESUME":
                await self._set_paused(statement.verb == "PAUSE")
            case "FLUSH":
                await self.flush()
            case "WAIT":
                await self._wait()
            case "RECOVER":
                await self._recover()

    async def _maintain(self, statement: s.Maintain) -> Result | None:
        match statement.verb:
            case "RESYNC":
                await self.core.capture.resync(statement.name)
            case "REWIND":
                await self.core.delivery.rewind(statement.name, statement.epoch)
            case "REPLAY":
                count = await self.core.delivery.replay(statement.name)
                return Result(["rows"], [{"rows": count}], self.core.meta.committed_epoch())
            case "VERIFY":
                from headwater.runtime.verify import verify

                rows = await verify(self.core, statement.name, repair=statement.repair)
                columns = ["split_id", "left", "right", "rows", "source_rows", "equal"]
                columns += ["repaired"] * statement.repair
                shown = [{name: row[name] for name in columns} for row in rows]
                return Result(columns, shown, self.core.meta.committed_epoch())
        return None

    async def flush(self) -> int:
        await self.core.writes.settle()
        return await self.core.main.checkpoint()

    async def _set_paused(self, paused: bool) -> None:
        kind = MutationKind.PAUSE if paused else MutationKind.RESUME
        await self.core.main.request(Mutation(kind))
        await asyncio.to_thread(self.core.meta.set_setting, "paused", "1" if paused else "0")
        self.core.settings_changed(0)

    async def _wait(self) -> None:
        await self.core.writes.settle()
        while any(j.state == "creating" for j in self.core.registry.by_id.values()):
            await asyncio.sleep(WAIT_POLL_S)

    async def _recover(self) -> None:
        before = self.core.main.recoveries
        await self.core.main.recover()
        while self.core.main.recoveries == before:
            await asyncio.sleep(0.02)
        await self.core.main.checkpoint()
        self.core.creating.retry()

    async def _show(self, statement: s.Show) -> Result:
        epoch = self.core.meta.committed_epoch()
        kinds = {"TABLES": "table", "SOURCES": "source", "SINKS": "sink", "MATERIALIZED VIEWS": "view", "VIEWS": "view"}
        if statement.what == "JOBS":
            return Result(["id", "name", "kind", "state", "progress", "definition"], self._job_list(), epoch)
        if statement.what == "PARAMETERS":
            rows = [
                {"name": p.name, "value": self.core.parameters[p.name], "default": p.default, "description": p.about}
                for p in PARAMETERS.values()
            ]
            return Result(["name", "value", "default", "description"], rows, epoch)
        if statement.what == "DEAD LETTERS":
            return Result(["sink", "at", "epoch", "rows", "code", "reason", "path", "replayed"], self._letters(), epoch)
        if statement.what in kinds:
            found = self.core.registry.of_kind(kinds[statement.what])
            return Result(["name"], [{"name": j.name} for j in found], epoch)
        raise UsageError(
            "SQL_SYNTAX",
            f"SHOW {statement.what} is not known",
            hint=suggestion("", ["JOBS", "PARAMETERS", "DEAD LETTERS", *kinds]),
        )

    def _letters(self) -> list[dict[str, Any]]:
        names = {j.id: j.name for j in self.core.registry.of_kind("sink")}
        rows = self.core.meta.dead_letter_rows()
        return [
            {**r, "sink": names[r["sink_id"]], "at": json_value(moment(r["at"]))} for r in rows if r["sink_id"] in names
        ]

    def _job_list(self) -> list[dict[str, Any]]:
        rows = []
        for row in self.core.catalogue.jobs():
            progress = self.core.progress_of(row["id"])
            rows.append(
                {
                    "id": row["id"],
                    "name": row["name"],
                    "kind": row["kind"],
                    "state": row["state"],
                    "progress": "100%" if row["state"] == "live" else progress.text(),
                    "definition": row["definition"],
                }
            )
        return rows

    async def _describe(self, statement: s.Describe) -> Result:
        if statement.catalogue:
            schema = keyed(columns_of(statement.name), ())
        else:
            schema = schema_of(self.core.registry.find(statement.name, "table", "view"))
        rows = [
            {"column": c.name, "type": c.type, "nullable": c.nullable, "key": c.name in schema.key}
            for c in schema.visible
        ]
        return Result(["column", "type", "nullable", "key"], rows, self.core.meta.committed_epoch())

    async def _explain(self, statement: s.Explain) -> Result:
        inner = statement.inner
        if isinstance(inner, s.CreateView):
            text = await self.core.creating.explain(inner)
        elif isinstance(inner, s.Query):
            frame = await self._frame(inner)
            text = await asyncio.to_thread(_plan_text, frame)
        else:
            raise UsageError("UNSUPPORTED_STATEMENT", "EXPLAIN takes a query or CREATE MATERIALIZED VIEW")
        return Result(["plan"], [{"plan": line} for line in text.splitlines()], self.core.meta.committed_epoch())


async def _parsed(text: str) -> AsyncIterator[s.Statement]:
    """The statements of a text, each read in a thread: a long INSERT takes seconds, and epochs go on meanwhile."""
    statements = parse(text)
    while (statement := await asyncio.to_thread(_next_statement, statements, len(text))) is not None:
        yield statement


def _next_statement(statements: Iterator[s.Statement], size: int) -> s.Statement | None:
    if size < LONG_TEXT:
        return next(statements, None)
    with _uncollected():
        return next(statements, None)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cyclic collector: while a tree of millions of nodes grows, it would go through all of them again
    and again, and everything else in this process stands meanwhile."""
    global _long_texts
    with _LONG_TEXTS:
        _long_texts += 1
        gc.disable()
    try:
        yield
    finally:
        with _LONG_TEXTS:
            _long_texts -= 1
            if not _long_texts:
                gc.enable()


def _limit(name: str, value: str | None) -> int | None:
    """None = unlimited (also `default` and −1), 0 = pause, n = rows a second, or how many at once."""
    if value is None or value == "-1":
        return None
    if "PARALLELISM" in name and not (value.isdigit() and int(value)):
        raise UsageError("OPTION_VALUE", f"{name} takes a whole number from 1 on", hint=f"{name} = 4, or DEFAULT")
    if not value.isdigit():
        raise UsageError("OPTION_VALUE", f"{name} takes a whole number", hint="default or -1 means no limit, 0 pauses")
    return int(value)


def _plan_text(frame: Any) -> str:
    import contextlib
    import io

    buffer = io.StringIO()
    with contextlib.redirect_stdout(buffer):
        frame.explain("formatted")
    return buffer.getvalue()


def _result_frame(spark: Any, result: Result) -> Any:
    rows = [tuple(None if v is None else str(v) for v in r.values()) for r in result.rows]
    return spark.createDataFrame(rows, ", ".join(f"{quoted(c)} STRING" for c in result.columns))


def _drop_hint(job: JobRow) -> str:
    kind = "MATERIALIZED VIEW" if job.kind == "view" else job.kind.upper()
    return f"DROP {kind} {job.name} first, choose another name, or say IF NOT EXISTS"
