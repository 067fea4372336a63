"""A complete sink of one's own, over SQLite: the example of docs/sinks.md, held to `check_sink` like all others.

    CREATE SINK mine FROM orders WITH (connector='python', class='headwater.testing.example_sink:SqliteSink',
                                       python.path='/tmp/mine.db')

What makes it exactly once is one transaction in `commit`: the rows and the progress row are changed together, and the
progress row is looked at inside of it. Tasks write into files of their own, named by the attempt; only files of
attempts that Spark reported as successful are committed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from headwater.errors import TransientError
from headwater.model.schema import OP, OP_DELETE, Column
from headwater.sink.base import BaseSink
from headwater.sink.options import SinkOptions
from headwater.sink.sink import Progress, Token, Verdict, fenced, judge_progress


class SqliteSink(BaseSink):
    """One table `target` (key, row as JSON) and one progress row in a SQLite file that the tasks can reach too."""

    takes_rows = True  # `write` does nothing with a batch but `run_tasks`

    def __init__(
        self, name: str, options: SinkOptions, columns: Sequence[Column], key: Sequence[str], generation: int
    ) -> None:
        super().__init__(name, options, columns, key, generation)
        self.path = Path(str(options.properties["path"]))

    def validate(self, columns: Sequence[Column], key: Sequence[str]) -> None:
        with self._transaction() as db:
            db.execute("CREATE TABLE IF NOT EXISTS target (key TEXT, row TEXT)")
            db.execute("CREATE TABLE IF NOT EXISTS progress (sink TEXT PRIMARY KEY, epoch INT, generation INT)")

    def claim(self) -> None:
        with self._transaction() as db:
            stored = self._owned(db)
            epoch = stored.epoch if stored is not None else None
            db.execute("INSERT OR REPLACE INTO progress VALUES (?, ?, ?)", (self.name, epoch, self.generation))

    def prepare(self, from_epoch: int, to_epoch: int) -> Token:
        with self._transaction() as db:
            self._owned(db)
        return self.token(from_epoch, to_epoch)

    def write(self, token: Token, batch: Any) -> Token:
        from headwater.sink.encode import json_rows
        from headwater.spark.sink import run_tasks

        stem, names, key = f"{self.path}-{token.attempt}", list(self.column_names), list(self.key)

        def stage(batches: Iterator[Any], info: Any) -> dict[str, Any]:
            path, rows = f"{stem}-{info.attempt}", 0
            with open(path, "w", encoding="utf-8") as file:
                for batch in batches:
                    keys = json_rows(batch, key).to_pylist() if key else [None] * batch.num_rows
                    parts = zip(batch.column(OP).to_pylist(), keys, json_rows(batch, names).to_pylist(), strict=True)
                    file.writelines(json.dumps(part) + "\n" for part in parts)
                    rows += batch.num_rows
            return {"rows": rows, "path": path}

        results = run_tasks(batch, stage)
        return token.written(rows=self.rows_of(results), files=[r["path"] for r in results])

    def commit(self, token: Token) -> None:
        with self._transaction() as db:
            if judge_progress(self._progress(db), token) is Verdict.ALREADY:
                return
            for path in token.payload["files"]:
                for line in Path(path).read_text(encoding="utf-8").splitlines():
                    op, key, row = json.loads(line)
                    db.execute("DELETE FROM target WHERE key = ?", (key,))
                    if op != OP_DELETE:
                        db.execute("INSERT INTO target VALUES (?, ?)", (key, row))
            db.execute("UPDATE progress SET epoch = ? WHERE sink = ?", (token.to_epoch, self.name))
        self.abort(token)

    def last_committed(self) -> int | None:
        with self._transaction() as db:
            stored = self._progress(db)
        return stored.epoch if stored is not None else None

    def reset(self, to_epoch: int | None) -> None:
        with self._transaction() as db:
            self._owned(db)
            db.execute("UPDATE progress SET epoch = ? WHERE sink = ?", (to_epoch, self.name))

    def abort(self, token: Token) -> None:
        for path in token.payload.get("files", ()):
            Path(path).unlink(missing_ok=True)

    def _progress(self, db: sqlite3.Connection) -> Progress | None:
        row = db.execute("SELECT epoch, generation FROM progress WHERE sink = ?", (self.name,)).fetchone()
        return Progress(row[0], row[1]) if row is not None else None

    def _owned(self, db: sqlite3.Connection) -> Progress | None:
        stored = self._progress(db)
        if stored is not None and stored.generation > self.generation:
            raise fenced(self.name)
        return stored

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One writer at a time, from the first statement on."""
        try:
            with closing(sqlite3.connect(self.path, timeout=30, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                try:
                    yield db
                except BaseException:
                    db.execute("ROLLBACK")
                    raise
                db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise TransientError(
                "SINK_UNREACHABLE", "the file cannot be used now", detail=type(error).__name__
            ) from None


__all__ = ["SqliteSink"]
