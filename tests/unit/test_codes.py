"""The list of error codes is complete, and its page is the list."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from headwater import codes

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "headwater"
# Errors that tests and simulations make up.
MADE_UP = {"TEST_LOST"}
MAKERS = re.compile(r".*Error|refuse|explained|translate|_error|_refuse")


def calls() -> Iterator[tuple[str, str]]:
    """(code, file) of every call that makes an error with a constant code."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if MAKERS.fullmatch(name):
                for argument in node.args[:2]:
                    if isinstance(argument, ast.Constant) and is_code(argument.value):
                        yield argument.value, path.name


def is_code(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", value) is not None and len(value) > 3


def test_every_code_that_the_source_uses_is_in_the_list() -> None:
    used = {code for code, file in calls() if not file.startswith(("simulat", "virtual"))}
    assert len(used) > 100
    assert used - set(codes.CODES) - MADE_UP == set()


def test_every_code_of_the_list_is_used() -> None:
    text = "\n".join(p.read_text() for p in SOURCE.rglob("*.py") if p.name != "codes.py")
    composed = {"UNKNOWN_SINK", "UNKNOWN_VIEW"}  # Registry.find makes UNKNOWN_ + kind
    assert [c for c in codes.CODES if c not in text and c not in composed] == []


def test_a_code_is_in_one_group_only_and_its_text_is_one_plain_sentence() -> None:
    assert sum(len(g) for g in codes.GROUPS.values()) == len(codes.CODES)
    assert [c for c, text in codes.CODES.items() if not text or text.endswith(".") or len(text) > 110] == []


def test_the_page_is_made_from_the_list() -> None:
    assert (ROOT / "docs" / "errors.md").read_text() == codes.markdown(), "python -m headwater.codes > docs/errors.md"
