"""The jobs that there are: an index over the committed job rows. Reloaded after each commit that changes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headwater.config import suggestion
from headwater.errors import UsageError
from headwater.model.schema import Schema
from headwater.storage.checkpoint import JobRow


class Registry:
    """Jobs by id and by name (without case). Dropped jobs are not in it."""

    def __init__(self, rows: Iterable[JobRow] = ()) -> None:
        self.by_id: dict[int, JobRow] = {}
        self._by_name: dict[str, JobRow] = {}
        self.load(rows)

    def load(self, rows: Iterable[JobRow]) -> None:
        self.by_id = {r.id: r for r in rows}
        self._by_name = {r.name.lower(): r for r in self.by_id.values()}

    def get(self, name: str) -> JobRow | None:
        return self._by_name.get(name.lower())

    def find(self, name: str, *kinds: str) -> JobRow:
        """The job of this name; UsageError if there is none, or it is of another kind."""
        job = self.get(name)
        if job is None:
            wanted = kinds[0] if len(kinds) == 1 else "table"
            names = [r.name for r in self.by_id.values() if not kinds or r.kind in kinds]
            hint = suggestion(name, names) if names else f"CREATE {wanted.upper()} {name} …"
            raise UsageError(f"UNKNOWN_{wanted.upper()}", f"there is no {wanted} {name}", hint=hint)
        if kinds and job.kind not in kinds:
            raise UsageError("WRONG_KIND", f"{job.name} is a {job.kind}, not a {' or '.join(kinds)}")
        return job

    def of_kind(self, *kinds: str) -> list[JobRow]:
        return [r for r in self.by_id.values() if r.kind in kinds]

    def depends_on(self, job: JobRow) -> list[int]:
        """The ids of the jobs that this one reads."""
        return [int(i) for i in job.spec.get("inputs", ())]

    def tables_behind(self, job: JobRow) -> list[JobRow]:
        """The tables that a view reads, directly or through other views."""
        found: dict[int, JobRow] = {}
        todo = self.depends_on(job)
        while todo:
            row = self.by_id.get(todo.pop())
            if row is not None and row.kind == "table":
                found[row.id] = row
            elif row is not None:
                todo += self.depends_on(row)
        return [found[i] for i in sorted(found)]

    def dependants(self, job_id: int) -> list[JobRow]:
        return [r for r in self.by_id.values() if job_id in self.depends_on(r)]

    def all_dependants(self, job_id: int) -> list[JobRow]:
        """Everything that reads this job, directly or not, each after what it reads."""
        found: dict[int, JobRow] = {}
        todo = [job_id]
        while todo:
            for row in self.dependants(todo.pop()):
                if row.id not in found:
                    found[row.id] = row
                    todo.append(row.id)
        return [found[i] for i in sorted(found)]

    def view_levels(self, views: Sequence[JobRow]) -> list[list[JobRow]]:
        """Views in layers: each reads only tables and views of earlier layers."""
        left = {v.id: v for v in views}
        levels: list[list[JobRow]] = []
        while left:
            ready = [v for v in left.values() if not any(i in left for i in self.depends_on(v))]
            if not ready:
                raise RuntimeError("views depend on each other in a circle")
            levels.append(ready)
            for view in ready:
                del left[view.id]
        return levels


def schema_of(job: JobRow) -> Schema:
    return Schema.from_dict(job.spec["schema"])
