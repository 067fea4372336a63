"""The documentation is held to the code: SQL that parses, commands and options, paths and names that exist.

What the pages show is run, block by block, by tests/integration/test_docs_examples.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from headwater.cli.commands import app
from headwater.sql.parser import parse

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [str(p.relative_to(ROOT)) for p in PAGES]
BLOCK = re.compile(r"^```(\S[^\n]*)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
SOURCE_PATH = re.compile(r"`((?:[a-z0-9_]+/)*[a-z0-9_]+\.py)`(?::\s+`(\w+)`)?")


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_sql_block_parses(page: Path) -> None:
    for text in blocks(page, "sql"):
        for shown in _without_ellipsis(text):
            assert list(parse(shown)), f"nothing in {shown!r}"


def _without_ellipsis(text: str) -> list[str]:
    """A block is taken whole; lines that end in … show a shape and are left out."""
    kept = "\n".join(line for line in text.splitlines() if "…" not in line)
    return [kept] if kept.strip() else []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_headwater_command_and_flag_exists(page: Path) -> None:
    group = typer.main.get_command(app)
    commands = group.commands  # type: ignore[attr-defined]
    for line in "\n".join(blocks(page, "bash")).splitlines():
        words = line.split("#")[0].split()
        if words[:1] != ["headwater"]:
            continue
        name = next(w for w in words[1:] if not w.startswith("-"))
        assert name in commands, line
        flags = {o for c in (group, commands[name]) for p in c.params for o in p.opts}
        used = {w.split("=")[0] for w in words[1:] if w.startswith("--") or re.fullmatch(r"-\w", w)}
        assert used <= flags, f"{line}: {used - flags}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_test_that_is_named_exists(page: Path) -> None:
    for target in re.findall(r"`(tests/[\w/.]+)`", page.read_text()):
        assert (ROOT / target).exists(), target


def test_architecture_names_files_and_things_that_exist() -> None:
    found = SOURCE_PATH.findall((ROOT / "ARCHITECTURE.md").read_text())
    assert len(found) > 20
    for path, name in found:
        file = ROOT / path if path.startswith("tests/") else ROOT / "src" / "headwater" / path
        assert file.exists(), path
        if name:
            assert re.search(rf"\b(class|def) {name}\b", file.read_text()), f"{path}: {name}"


def test_postgres_page_lists_every_option_of_the_source() -> None:
    from headwater.connectors.postgres.client import OPTIONS

    text = (ROOT / "docs" / "postgres.md").read_text()
    assert [o for o in OPTIONS if f"`{o}`" not in text] == []


def test_operating_page_lists_every_parameter_with_its_default() -> None:
    from headwater.config import PARAMETERS

    text = (ROOT / "docs" / "operating.md").read_text()
    for parameter in PARAMETERS.values():
        assert f"| `{parameter.name}` | {parameter.default} |" in text, parameter.name


def test_readme_names_every_page_of_the_documentation() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [p.name for p in (ROOT / "docs").glob("*.md") if f"docs/{p.name}" not in readme] == []
