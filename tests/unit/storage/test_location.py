"""The meta store of a data directory is found again by every later command, and its password is never written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.errors import UsageError
from headwater.storage.location import URL_FILE, claim_meta_store, existing_meta_store, has_meta_store

URL = "postgresql://app:${HW_TEST_PASSWORD}@db:5432/meta"


def test_the_embedded_one_is_the_default(tmp_path: Path) -> None:
    assert not has_meta_store(tmp_path)
    with pytest.raises(UsageError, match="NO_DATA_DIRECTORY"):
        existing_meta_store(tmp_path)
    assert claim_meta_store(tmp_path, None) == f"sqlite:///{tmp_path}/meta.db"


def test_a_given_url_is_recorded_as_it_was_written_and_resolved_for_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HW_TEST_PASSWORD", "p@ss/w:rd")
    url = claim_meta_store(tmp_path, URL)
    assert url == "postgresql+psycopg://app:p%40ss%2Fw%3Ard@db:5432/meta"
    assert (tmp_path / URL_FILE).read_text() == URL + "\n"
    assert existing_meta_store(tmp_path) == claim_meta_store(tmp_path, None) == claim_meta_store(tmp_path, URL) == url


def test_another_url_for_the_same_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HW_TEST_PASSWORD", "x")
    claim_meta_store(tmp_path, URL)
    with pytest.raises(UsageError, match="META_STORE_DIFFERS"):
        claim_meta_store(tmp_path, "postgresql://app:${HW_TEST_PASSWORD}@other/meta")
    embedded = tmp_path / "embedded"
    embedded.mkdir()
    (embedded / "meta.db").touch()
    with pytest.raises(UsageError, match="META_STORE_DIFFERS"):
        claim_meta_store(embedded, URL)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("postgresql://app:secret@db/meta", "LITERAL_SECRET"),
        ("postgresql://app@db/meta?password=secret", "LITERAL_SECRET"),
        ("postgresql://app:${PG}secret@db/meta", "LITERAL_SECRET"),
        ("postgresql://app@db/meta?sslpassword=secret", "LITERAL_SECRET"),
        ("not a url", "META_STORE_URL"),
    ],
)
def test_a_wrong_url_is_refused_and_leaves_nothing(tmp_path: Path, url: str, code: str) -> None:
    with pytest.raises(UsageError, match=code) as caught:
        claim_meta_store(tmp_path, url)
    assert "secret@" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
