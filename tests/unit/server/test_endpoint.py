"""endpoint.json: how commands find the engine."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from headwater.errors import UsageError
from headwater.server.endpoint import (
    Endpoint,
    is_loopback,
    lock_directory,
    new_token,
    parse_address,
    read_endpoint,
    remove_endpoint,
    write_endpoint,
)

ENDPOINT = Endpoint(url="http://127.0.0.1:8734", token="secret", pid=4711, generation=3, read_token="look")


def test_file_has_exactly_the_promised_fields(tmp_path: Path) -> None:
    path = write_endpoint(tmp_path, ENDPOINT)
    assert json.loads(path.read_text()) == {
        "url": "http://127.0.0.1:8734",
        "token": "secret",
        "pid": 4711,
        "generation": 3,
        "read_token": "look",
    }


def test_only_the_owner_can_read_it_whatever_the_umask_and_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "endpoint.json").write_text("{}")
    os.chmod(tmp_path / "endpoint.json", 0o666)
    before = os.umask(0)
    try:
        path = write_endpoint(tmp_path, ENDPOINT)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_cannot_be_utf_8_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="DATA_DIRECTORY_UNUSABLE") as caught:
        lock_directory(tmp_path / "caf\udce9")  # a name in Latin-1, as Python reads it
    assert "LC_ALL=C.UTF-8" in caught.value.hint and "\\udce9" in caught.value.message
    assert list(tmp_path.iterdir()) == []
    os.close(lock_directory(tmp_path / "café ☃"))


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write_endpoint(tmp_path, ENDPOINT)
    assert read_endpoint(tmp_path) == ENDPOINT


def test_missing_or_broken_file_reads_as_none(tmp_path: Path) -> None:
    assert read_endpoint(tmp_path) is None
    for broken in ("", "[]", '{"url": 1}', "{"):
        (tmp_path / "endpoint.json").write_text(broken)
        assert read_endpoint(tmp_path) is None


def test_older_engine_does_not_remove_the_file_of_a_newer_one(tmp_path: Path) -> None:
    write_endpoint(tmp_path, ENDPOINT)
    remove_endpoint(tmp_path, generation=2)
    assert read_endpoint(tmp_path) == ENDPOINT
    remove_endpoint(tmp_path, generation=3)
    assert read_endpoint(tmp_path) is None
    remove_endpoint(tmp_path, generation=3)


def test_token_is_not_in_the_text_of_an_endpoint() -> None:
    assert "secret" not in repr(ENDPOINT) and "look" not in repr(ENDPOINT)


def test_the_page_s_address_has_the_token_where_no_server_sees_it() -> None:
    assert ENDPOINT.page == "http://127.0.0.1:8734/#token=secret"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_only_loopback_is_out_of_the_network_s_reach(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 43


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), (":8734", ("127.0.0.1", 8734)), ("[::1]:80", ("::1", 80)), ("db:1", ("db", 1))],
)
def test_an_address_is_a_host_and_a_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "foo", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:", "h:-1", "http://h:80"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(text)


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="DATA_DIRECTORY_UNUSABLE"):
            lock_directory(path)
