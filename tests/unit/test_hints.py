"""Hints that name statements: each can be typed as it stands, and none is refused in the state that it is said in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater
from headwater.connectors.postgres.shape import Relation, shape_changed
from headwater.errors import DefiniteError
from headwater.runtime.healing import SHAPE_SUSPECTS, TABLE_LOST, being_healed
from headwater.sql.parser import parse

SOURCE = Path(headwater.__file__).parent
OURS = "RESYNC|VERIFY|REWIND|REPLAY|RECOVER|RESUME|PAUSE|FLUSH|WAIT|SHOW|CANCEL|DROP"
# Where a statement ends in a sentence.
ENDS = re.compile(r"[;,:]| and | or |\bfirst\b| lists them| to (?:take|be) |, with ")
# Sentences of which the verb is one of ours: there is no name to put in.
SENTENCES = {"DROP it", "DROP the table", "RESYNC the table", "DROP", "SHOW COLUMNS"}


def hints() -> Iterator[tuple[str, str]]:
    """Every hint in the code with its place; what is put in is a name."""
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "hint":
                for text in texts(node.value):
                    yield f"{file.relative_to(SOURCE)}:{node.value.lineno}", text


def texts(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else put_in(p) for p in parts)
        case ast.IfExp(body=one, orelse=other):
            yield from texts(one)
            yield from texts(other)


def put_in(part: ast.expr) -> str:
    return "TABLE" if "kind.upper()" in ast.unparse(part) else "name"


def statements() -> list[tuple[str, str]]:
    pieces = [(place, piece.strip()) for place, text in hints() for piece in ENDS.split(text)]
    cut = [(place, re.sub(r"^(then|or|and|list the columns with) ", "", piece)) for place, piece in pieces]
    found = [(place, piece) for place, piece in cut if re.match(rf"({OURS})\b", piece) and "…" not in piece]
    return [(place, piece) for place, piece in found if piece not in SENTENCES]


def test_statements_in_hints_are_found() -> None:
    found = {text for _, text in statements()}
    assert {"RESYNC name", "VERIFY name REPAIR", "RESUME", "RECOVER", "REWIND sink TO 123", "SHOW JOBS"} <= found, found


@pytest.mark.parametrize(("place", "text"), statements())
def test_a_statement_in_a_hint_can_be_typed(place: str, text: str) -> None:
    assert list(parse(text)), place


def test_a_table_that_is_being_healed_is_not_to_be_resynced_by_hand() -> None:
    for code in TABLE_LOST | SHAPE_SUSPECTS:
        healed = being_healed(DefiniteError(code, "what", detail="why", hint="RESYNC it"))
        assert (healed.code, healed.message, healed.detail) == (code, "what", "why")
        assert "resync" not in healed.hint.lower()


def test_a_type_that_no_resync_takes_is_said_to_need_a_new_table() -> None:
    relation = Relation(1, "public", "t", "d", ())
    assert "DROP it" in shape_changed(relation, "what", retyped=True).hint
    assert "DROP" not in shape_changed(relation, "what", retyped=False).hint


def test_no_hint_names_a_resync_for_what_a_resync_would_have_to_read() -> None:
    for place, text in hints():
        if place.startswith("spark/query.py"):
            assert "resync" not in text.lower(), place
