"""What is the owner's alone: modes whatever the umask, and data directories that may be somebody else's."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.cli.client import running_engine
from headwater.errors import UsageError
from headwater.server.endpoint import Endpoint, lock_directory, write_endpoint
from headwater.storage.files import DataDir, path_part
from headwater.storage.location import claim_meta_store, existing_meta_store
from headwater.storage.meta import MetaStore
from headwater.storage.private import SAFE_DIRECTORY, check_owner, current_umask, temporary_directory

NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(directory: Path) -> dict[str, int]:
    found = {".": stat.S_IMODE(directory.stat().st_mode)}
    return found | {str(p.relative_to(directory)): stat.S_IMODE(p.stat().st_mode) for p in directory.rglob("*")}


def open_ones(directory: Path) -> dict[str, str]:
    return {name: oct(mode) for name, mode in modes(directory).items() if mode & 0o077}


def test_what_an_engine_makes_is_its_owners_alone_whatever_the_umask(tmp_path: Path, no_umask: None) -> None:
    data = tmp_path / "above" / "data"
    lock = lock_directory(data)
    store = MetaStore(claim_meta_store(data, None))
    store.acquire()
    write_endpoint(data, Endpoint("http://127.0.0.1:1", "t", 1, 1))
    files = DataDir(str(data))
    files.make("staging/reads/x")
    with files.create("tables/1/y/z.parquet") as out:
        out.write(b"rows")
    assert {"meta.db", "meta.db-wal", "meta.db-shm", "engine.lock", "endpoint.json"} <= set(modes(data))
    assert open_ones(data) == {}
    assert not (tmp_path / "above").stat().st_mode & 0o077
    store.close()
    os.close(lock)


def test_a_meta_stores_url_is_its_owners_alone(tmp_path: Path, no_umask: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HW_TEST_PASSWORD", "x")
    claim_meta_store(tmp_path, "postgresql://app:${HW_TEST_PASSWORD}@db/meta")
    assert stat.S_IMODE((tmp_path / "meta-store.url").stat().st_mode) == 0o600


def test_an_open_directory_of_an_earlier_engine_is_closed_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    (data / "tables" / "1").mkdir(parents=True)
    (data / "tables" / "1" / "a.parquet").write_bytes(b"")
    (data / "meta.db").write_bytes(b"")
    outside = tmp_path / "outside"
    outside.write_bytes(b"")
    outside.chmod(0o644)
    (data / "link").symlink_to(outside)
    for path in (data, *data.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with caplog.at_level(logging.WARNING, logger="headwater"):
        os.close(lock_directory(data))
    assert set(open_ones(data)) <= {"link"}
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644
    assert "was open to other users" in caplog.text
    caplog.clear()
    os.close(lock_directory(data))
    assert caplog.text == ""


def test_the_umask_that_is_passed_on_to_workers_is_the_one_that_there_is(no_umask: None) -> None:
    assert current_umask() == 0
    os.umask(0o027)
    assert current_umask() == os.umask(0o027) == 0o027


@pytest.mark.parametrize("name", ["", "meta-store.url", "endpoint.json", "meta.db"])
@root_only
def test_a_directory_or_a_file_of_it_that_belongs_to_another_user_is_not_followed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.setenv("HW_SECRET", "mine")
    (tmp_path / "meta-store.url").write_text("postgresql://x:${HW_SECRET}@127.0.0.1:1/db")
    write_endpoint(tmp_path, Endpoint("http://127.0.0.1:1", "t", 1, 1))
    (tmp_path / "meta.db").touch()
    assert existing_meta_store(tmp_path).count("mine") == 1
    os.chown(tmp_path / name, NOBODY, NOBODY)
    for follow in (running_engine, existing_meta_store, lock_directory, lambda d: claim_meta_store(d, None)):
        with pytest.raises(UsageError, match="DATA_DIRECTORY_FOREIGN") as caught:
            follow(tmp_path)
        assert SAFE_DIRECTORY in caught.value.hint and "mine" not in caught.value.render()
    monkeypatch.setenv(SAFE_DIRECTORY, f"/elsewhere{os.pathsep}{tmp_path}")
    check_owner(tmp_path)
    monkeypatch.delenv(SAFE_DIRECTORY)
    monkeypatch.setenv("SUDO_UID", str(NOBODY))  # `sudo headwater status` on one's own directory
    check_owner(tmp_path)


@pytest.mark.parametrize("name", ["", "meta-store.url", "endpoint.json"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_to_is_not_followed(tmp_path: Path, name: str, mode: int) -> None:
    for file in ("meta-store.url", "endpoint.json"):
        (tmp_path / file).write_text("")
        (tmp_path / file).chmod(0o600)
    check_owner(tmp_path)
    path = tmp_path / name
    path.chmod(stat.S_IMODE(path.stat().st_mode) | mode)
    with pytest.raises(UsageError, match="DATA_DIRECTORY_FOREIGN") as caught:
        running_engine(tmp_path)
    assert f"chmod -R go-rwx {tmp_path}" in caught.value.hint


@root_only
def test_a_link_that_another_user_made_or_that_leads_to_his_directory_is_not_followed(tmp_path: Path) -> None:
    mine, link, file = tmp_path / "mine", tmp_path / "link", tmp_path / "file"
    mine.mkdir(mode=0o700)
    (mine / "x").touch()
    link.symlink_to(mine)
    check_owner(link)
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(UsageError, match="DATA_DIRECTORY_FOREIGN"):
        check_owner(link)
    file.write_text("postgresql://127.0.0.1:1/db")
    os.chown(file, NOBODY, NOBODY)
    (mine / "meta-store.url").symlink_to(file)
    with pytest.raises(UsageError, match="DATA_DIRECTORY_FOREIGN"):
        check_owner(mine)


def test_an_empty_directory_is_taken_and_closed_also_if_others_could_write_to_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o777)
    os.close(lock_directory(data))
    assert open_ones(data) == {}


@pytest.mark.parametrize("name", ["orders_out", "Größe 2", "a-b.c", "x@y", "it's"])
def test_a_harmless_name_is_its_own_part_of_a_path(name: str) -> None:
    assert path_part(name) == name


def test_no_name_leads_out_of_its_folder_and_no_two_names_have_the_same_part(tmp_path: Path) -> None:
    names = ["../../x", "..", ".", "", "/etc/passwd", "a/b", "a~2fb", "a%2fb", "a\0b", "a\nb", ".hidden", "x" * 400]
    names += ["x" * 401, "\u202egnp", "\udcff", "a\\b", "*", "{a,b}", "a?b#c", "a:b", "ü" * 300, "~", "~~"]
    parts = [path_part(n) for n in names]
    assert len(set(parts)) == len(names)
    for part in parts:
        assert (tmp_path / part).parent == tmp_path and part not in (".", "..") and not part.startswith(".")
        (tmp_path / part).mkdir()
    assert len(list(tmp_path.iterdir())) == len(names)


@root_only
def test_a_folder_in_the_place_for_temporary_ones_is_used_only_if_it_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    temporary_directory.cache_clear()
    ours = temporary_directory("kafka")
    assert ours == tmp_path / f"headwater-kafka-{os.getuid()}" and stat.S_IMODE(ours.stat().st_mode) == 0o700
    for spoil in (
        lambda: os.chown(ours, NOBODY, NOBODY),
        lambda: (os.chown(ours, os.getuid(), -1), ours.chmod(0o777)),
        lambda: (shutil.rmtree(ours), ours.symlink_to(tmp_path)),
    ):
        spoil()
        temporary_directory.cache_clear()
        other = temporary_directory("kafka")
        assert other != ours and stat.S_IMODE(other.stat().st_mode) == 0o700 and other.stat().st_uid == os.getuid()
    temporary_directory.cache_clear()
