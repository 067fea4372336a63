"""The body of POST /sql is what JSON says, and nothing else is."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import UsageError
from headwater.server.body import statement_of

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20)
)


@given(st.text(min_size=1).filter(str.strip), st.booleans(), st.dictionaries(st.text(max_size=5), SCALARS, max_size=5))
def test_statement_is_what_a_plain_decoder_gives(statement: str, ascii_only: bool, others: dict[str, object]) -> None:
    others.pop("statement", None)
    body = json.dumps({**others, "statement": statement}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert statement_of(body) == statement


@pytest.mark.parametrize("unit", ["ä", "\U0001f600", '"', "\\", "\n", "a\U0001f600", "xy\U0001f600"])
def test_long_statement_is_whole_although_it_is_decoded_in_parts(unit: str) -> None:
    statement = f"{unit * 100_000}x"
    for ascii_only in (True, False):
        assert statement_of(json.dumps({"statement": statement}, ensure_ascii=ascii_only).encode()) == statement


@given(st.binary(max_size=40), st.sampled_from([b"", b'{"statement": "', b'{"statement": "x", "y": ']))
def test_whatever_is_sent_is_a_statement_or_a_bad_request(body: bytes, before: bytes) -> None:
    with contextlib.suppress(UsageError):
        assert statement_of(before + body)
