"""Python functions that the user registered: kept in the meta store, and known to Spark from the engine's start on.

A function is taken to be deterministic: the same arguments give the same value. What is registered from Python
(`Engine.register_udf`) is not kept: register it again after each start; views that use it wait for it until then.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import sqlglot
from sqlglot import exp

from headwater.errors import HeadwaterError, UsageError
from headwater.model.spark_text import SparkText
from headwater.sql import statements as s
from headwater.storage.checkpoint import JobRow

if TYPE_CHECKING:
    from headwater.engine import EngineCore

log = logging.getLogger(__name__)
_SETTING: Final = "function:"
_DROPPED: Final = ""  # settings are never deleted


class Functions:
    """See the head of this module."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.broken: set[str] = set()  # those that are stored and could not be loaded

    def load(self) -> None:
        """Register what is stored; a function that cannot be loaded stops only what uses it."""
        for name, value in self.core.meta.settings(_SETTING).items():
            if value == _DROPPED:
                continue
            stored = json.loads(value)
            try:
                self.register(name, self._loaded(stored["target"]), stored["returns"])
            except HeadwaterError as error:
                log.warning("function %s: %s", name, error)
                self.broken.add(name)
                self.core.record_error(None, name, error, retrying=False)

    def register(self, name: str, function: Callable[..., Any], returns: str) -> None:
        from headwater.spark.functions import register

        register(self.core.spark, name, function, returns)

    def _loaded(self, target: str) -> Callable[..., Any]:
        from headwater.spark.functions import load_function

        return load_function(target)

    def has(self, statement: s.CreateFunction) -> bool:
        """Whether the function is there as it is defined; UsageError if it is there as another one."""
        name = statement.name.lower()
        stored = self.core.meta.settings(_SETTING).get(name, _DROPPED)
        if stored == _DROPPED:
            return False
        known = json.loads(stored)
        same = known["target"] == _anywhere(statement.target) and _plain(known["returns"]) == _plain(statement.returns)
        if not same and statement.or_replace:
            return False
        if not same:
            raise UsageError(
                "DEFINITION_DIFFERS",
                f"function {name} exists with another definition",
                detail=f"stored: RETURNS {known['returns']} … AS '{known['target']}'",
                hint=f"CREATE OR REPLACE FUNCTION {name} …, or give the new one another name",
            )
        return True

    async def create(self, statement: s.CreateFunction) -> None:
        name = statement.name.lower()
        stored = self.core.meta.settings(_SETTING).get(name, _DROPPED)
        if stored != _DROPPED and statement.or_replace:
            self._refuse_other_type(name, json.loads(stored)["returns"], statement.returns)
        elif stored != _DROPPED:
            if statement.if_not_exists:
                return
            raise UsageError(
                "ALREADY_EXISTS",
                f"function {name} exists already",
                hint=f"CREATE OR REPLACE FUNCTION {name} …, or IF NOT EXISTS",
            )
        target = _anywhere(statement.target)
        function = self._loaded(target)
        await self.core.jobs.run("query", "analyse", lambda: self.register(name, function, statement.returns))
        self.core.meta.set_setting(_SETTING + name, json.dumps({"target": target, "returns": statement.returns}))
        self.broken.discard(name)
        self.core.creating.retry()  # what failed because of it need not wait

    def _users(self, name: str) -> list[str]:
        return [job.name for job in self.core.registry.of_kind("view") if name in functions_of(job)]

    def _refuse_other_type(self, name: str, old: str, new: str) -> None:
        if _plain(old) != _plain(new) and (users := self._users(name)):
            what = f"function {name} gives {old}, which {', '.join(users)} store"
            raise UsageError("DEPENDANTS_EXIST", what, hint=f"RETURNS {old}, or drop them first")

    async def drop(self, statement: s.Drop) -> None:
        name = statement.name.lower()
        if self.core.meta.settings(_SETTING).get(name, _DROPPED) == _DROPPED:
            if statement.if_exists:
                return
            raise UsageError("UNKNOWN_FUNCTION", f"there is no function {name}")
        if users := self._users(name):
            raise UsageError(
                "DEPENDANTS_EXIST", f"function {name} is used by {', '.join(users)}", hint="drop them first"
            )
        self.core.meta.set_setting(_SETTING + name, _DROPPED)
        self.broken.discard(name)


def _plain(kind: str) -> str:
    return "".join(kind.lower().split())


def _anywhere(target: str) -> str:
    """A file by its full path: another start may have another working directory."""
    place, colon, member = target.rpartition(":")
    return f"{Path(place).absolute()}{colon}{member}" if place.endswith(".py") else target


def functions_of(job: JobRow) -> set[str]:
    """The functions of a view's query that are not Spark's own, as far as the parser can tell."""
    text = job.spec.get("plan", {}).get("sql", "")
    if not text:
        return set()
    tree = sqlglot.parse_one(text, read=SparkText)
    return {node.name.lower() for node in tree.find_all(exp.Anonymous)}
