"""What no statement may reach: code, and files of the machine (DESIGN: Trust).

A statement reads the tables that Headwater has, and calls functions that only compute. Spark has more: it takes a path
for a table, calls Java by name, pipes rows through a program, and reads files that an option names. All of that is
refused here, for every statement and wherever in it it stands, before anything of it runs. `binding.py` does the same
for the names of tables: what is neither a table of Headwater's nor a CTE is never left to Spark.
"""

from __future__ import annotations

from typing import Final

from sqlglot import exp

from headwater.errors import UsageError

# What may stand in FROM and LATERAL VIEW. Whatever a later Spark adds is refused until it is named here.
TABLE_FUNCTIONS: Final = frozenset(
    {"explode", "explode_outer", "posexplode", "posexplode_outer", "inline", "inline_outer", "stack", "json_tuple"}
    | {"range", "sequence", "variant_explode", "variant_explode_outer", "sql_keywords", "collations", "table_changes"}
)
_CODE: Final = "it calls code by its name"
_FILES: Final = "it reads files of the engine's machine"
# All of `SHOW FUNCTIONS` in Spark 4.1 that reach beyond their arguments, and what later versions are known to add.
REFUSED: Final[dict[str, str]] = {
    **dict.fromkeys(["reflect", "try_reflect", "java_method"], _CODE),
    "identifier": "it makes a name of a value",
    **dict.fromkeys(["input_file_name", "input_file_block_start", "input_file_block_length"], "it tells of files"),
    **dict.fromkeys(["from_protobuf", "to_protobuf", "from_avro", "to_avro", "schema_of_avro"], _FILES),
    **dict.fromkeys(["read_files", "python_worker_logs"], _FILES),
}
_XML_OPTIONS: Final = {"from_xml": 2, "schema_of_xml": 1}  # from this argument on
_XML_FILE: Final = "rowvalidationxsdpath"


def check_reach(tree: exp.Expr) -> None:
    """UsageError FUNCTION_NOT_ALLOWED for what the head of this module says."""
    for node in tree.walk():
        match node:
            case exp.QueryTransform():
                raise _refusal("TRANSFORM … USING", "it runs a program")
            case exp.Table() if not isinstance(node.this, exp.Identifier):
                _check_source(node.this)
            case exp.Lateral() if not isinstance(node.this, exp.Subquery):
                _check_source(node.this)
            case exp.Anonymous() | exp.AnonymousAggFunc():
                _check_call(str(node.name).lower(), node)
            case exp.Func():
                for name in node.sql_names():
                    _check_call(name.lower(), node)


def source_function(call: exp.Expr) -> str:
    """The name, as Spark knows it, of a function in FROM; empty for what is none."""
    if isinstance(call, exp.Anonymous):
        return str(call.name).lower()
    if isinstance(call, (exp.Func, exp.UDTF)):
        return call.sql(dialect="spark", comments=False).split("(", 1)[0].strip().lower()
    return ""


def _check_source(call: exp.Expr) -> None:
    name = source_function(call)
    if name in TABLE_FUNCTIONS:
        return
    if not name:
        text = call.sql(dialect="spark", comments=False)[:100]
        raise UsageError("UNKNOWN_TABLE", f"there is no table {text}", hint="tables have plain names")
    raise _refusal(name, REFUSED.get(name, "in FROM it is none of those that only compute"))


def _check_call(name: str, call: exp.Expr) -> None:
    if (reason := REFUSED.get(name)) is not None:
        raise _refusal(name, reason)
    if name in _XML_OPTIONS and not all(map(_is_plain, call.expressions[_XML_OPTIONS[name] :])):
        raise _refusal(name, f"of its options only plain texts are taken, and none of {_XML_FILE}")


def _is_plain(options: exp.Expr) -> bool:
    """Whether all names are written out (an escape may hide one), and none of them takes a file."""
    if not isinstance(options, exp.VarMap):
        return False
    names = options.args["keys"].expressions
    return all(isinstance(n, exp.Literal) and "\\" not in n.name and n.name.lower() != _XML_FILE for n in names)


def _refusal(name: str, reason: str) -> UsageError:
    return UsageError(
        "FUNCTION_NOT_ALLOWED", f"{name} cannot be used: {reason}", hint="docs/sql.md says what statements may reach"
    )
