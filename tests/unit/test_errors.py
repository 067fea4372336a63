"""Errors that nobody foresaw say where they came from, and nothing of what they were about."""

from __future__ import annotations

import pytest

from headwater.errors import place_of
from headwater.model.schema import Column, keyed


def test_the_place_of_an_unforeseen_error_is_in_our_code_and_without_its_text() -> None:
    with pytest.raises(AttributeError) as caught:
        keyed([Column("id", "INT"), None], ["id"])  # type: ignore[list-item]
    assert place_of(caught.value).startswith("AttributeError at schema.py:")
    assert place_of(KeyError("secret")) == "KeyError"
