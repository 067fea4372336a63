"""What a statement may do, by who it comes from (`model/trust.py`; DESIGN: Trust).

    READ    looks: queries, SHOW, DESCRIBE, EXPLAIN
    ADMIN   every statement, unless it brings code, or names a file of the engine's machine that holds a secret
    OWNER   everything

Code is what Python loads by a name that the statement gives. An engine that was started with `--allow-python` takes it
from ADMIN, too. What no statement may reach, whoever says it, is in `sql/reach.py`.
"""

from __future__ import annotations

import re
from typing import Final

from headwater.errors import UsageError
from headwater.model.trust import Trust
from headwater.sql import statements as s

LOOKS: Final = (s.Query, s.Show, s.Describe, s.Explain, s.SetVariable)
ALLOW: Final = "--allow-python"
_FILE: Final = re.compile(r"\$\{\s*file:", re.IGNORECASE)
# Options of client libraries by which they load a class or a library: PyIceberg's …-impl, librdkafka's plug-ins.
_LOADS: Final = re.compile(r"(^|[.-])impl$|plugin\.library\.paths|ssl\.(providers|engine)", re.IGNORECASE)


def check_trust(statement: s.Statement, trust: Trust, *, allow_code: bool) -> None:
    """UsageError READ_ONLY_TOKEN or CODE_NOT_ALLOWED for what the statement may not do."""
    if trust is Trust.READ and not isinstance(statement, LOOKS):
        raise UsageError(
            "READ_ONLY_TOKEN",
            f"the read token does not run {statement.text.split()[0].upper()}",
            hint="it is for queries, SHOW, DESCRIBE and EXPLAIN; the admin token runs every statement",
        )
    if trust is not Trust.OWNER and not allow_code and (what := _brings(statement)):
        raise UsageError(
            "CODE_NOT_ALLOWED",
            f"{what} is not taken over the endpoint",
            hint=f"put it into a file for headwater run FILE, or start the engine with headwater run {ALLOW}",
        )


def _brings(statement: s.Statement) -> str:
    """What of the statement is code, or a file; empty if nothing is."""
    if isinstance(statement, s.CreateFunction):
        return "CREATE FUNCTION … LANGUAGE PYTHON"
    options: dict[str, str] = getattr(statement, "options", {})
    for name, value in options.items():
        if name == "connector" and value.strip().lower() == "python":
            return "connector='python'"
        if _FILE.search(value):
            return f"the file of a secret in option {name}"
        if _LOADS.search(name):
            return f"option {name}, by which a library loads code,"
    return ""
