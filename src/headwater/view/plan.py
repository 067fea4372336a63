"""What the analysis of a view's query found: strategy, keys, hidden columns, and why it is not a cheaper strategy.

A plan is small and JSON-serialisable: it is stored with the view. The operator tree is not part of it; `lower.py` makes
it again from the SQL text, always the same. `analyse.py` makes plans; `spark/view.py` runs them.

The storage table of a view has the visible columns, `_key STRING` (identifies a row) and the plan's hidden columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

PART: Final = "_part"  # canonical text of the partition key of a view row (affected keys only)
COUNT: Final = "_count"  # rows behind a group (algebraic only)


class Strategy(StrEnum):
    """How a view is refreshed, the cheapest first."""

    ROWWISE = "rowwise"
    ALGEBRAIC = "algebraic"
    AFFECTED_KEYS = "affected_keys"
    FULL = "full"


# Spark jobs of one refresh of small changes, one input changed: one that writes, and one for each set of keys or rows
# that is sent to the scans. (base, per further join or grouping). Large changes run under adaptive execution, where
# every shuffle is a job too.
_JOBS: Final[Mapping[Strategy, tuple[int, int]]] = {
    Strategy.ROWWISE: (1, 0),
    Strategy.ALGEBRAIC: (2, 1),
    Strategy.AFFECTED_KEYS: (3, 2),
    Strategy.FULL: (6, 1),
}


def expected_jobs(strategy: Strategy, operators: int) -> int:
    """About how many Spark jobs a refresh takes; `operators`: joins, and groupings below the topmost one."""
    base, each = _JOBS[strategy]
    return base + each * operators


@dataclass(frozen=True, slots=True)
class ViewPlan:
    """The stored result of the analysis.

    `unique` says that the key columns identify a row; otherwise rows of a partition are told apart by their content and
    an occurrence number.
    """

    sql: str
    inputs: tuple[str, ...]
    strategy: Strategy
    columns: tuple[str, ...]
    hidden: tuple[tuple[str, str], ...] = ()
    partition_keys: tuple[str, ...] = ()
    unique: bool = True
    reasons: tuple[str, ...] = ()
    spark_jobs: int = 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "sql": self.sql,
            "inputs": list(self.inputs),
            "strategy": self.strategy.value,
            "columns": list(self.columns),
            "hidden": [list(pair) for pair in self.hidden],
            "partition_keys": list(self.partition_keys),
            "unique": self.unique,
            "reasons": list(self.reasons),
            "spark_jobs": self.spark_jobs,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ViewPlan:
        return cls(
            sql=data["sql"],
            inputs=tuple(data["inputs"]),
            strategy=Strategy(data["strategy"]),
            columns=tuple(data["columns"]),
            hidden=tuple((name, ddl) for name, ddl in data["hidden"]),
            partition_keys=tuple(data["partition_keys"]),
            unique=data["unique"],
            reasons=tuple(data["reasons"]),
            spark_jobs=data["spark_jobs"],
        )


def explain(plan: ViewPlan) -> str:
    """The text of `EXPLAIN CREATE MATERIALIZED VIEW`."""
    lines = [
        f"strategy:      {plan.strategy.value}",
        f"inputs:        {', '.join(plan.inputs)}",
        f"columns:       {', '.join(plan.columns)}",
        f"keys:          {', '.join(plan.partition_keys) or '(none: the whole view is one partition)'}",
        f"row identity:  {'by key' if plan.unique else 'by key, content and occurrence number'}",
        f"hidden:        {', '.join(f'{name} {ddl}' for name, ddl in (('_key', 'STRING'), *plan.hidden))}",
        f"spark jobs:    {_jobs_text(plan)}",
    ]
    if plan.reasons:
        lines.append("why not cheaper:")
        lines.extend(f"  - {reason}" for reason in plan.reasons)
    return "\n".join(lines)


def _jobs_text(plan: ViewPlan) -> str:
    again = f"about {plan.spark_jobs} per refresh of small changes"
    if plan.strategy is Strategy.FULL:
        return again
    return f"1, shared with other views, by a plan that is made once; {again} where it is planned again"
