"""How many files a process may have open is raised as far as it goes, and too few are named before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMAND = "from headwater.cli import main; main()"
SHOW = """
import resource
from headwater.limits import raise_open_files
print(raise_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limited(how: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f'{how} && exec "$@"', "bash", sys.executable, "-c", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_soft_limit_is_raised_to_the_hard_one_but_not_without_bound() -> None:
    assert limited("ulimit -Sn 300 && ulimit -Hn 3000", SHOW).stdout.split() == ["3000", "3000", "3000"]
    assert limited("ulimit -Sn 300", SHOW).stdout.split()[0] == str(min(65_536, int(_hard())))
    assert limited("ulimit -n 600", SHOW).stdout.split() == ["600", "600", "600"]


def _hard() -> str:
    return subprocess.run(["bash", "-c", "ulimit -Hn"], capture_output=True, text=True).stdout.replace(
        "unlimited", "65536"
    )


def test_too_few_files_are_named_with_what_to_type_before_anything_is_made(tmp_path: Path) -> None:
    done = limited("ulimit -n 256", COMMAND, "run", "--data-dir", str(tmp_path / "data"))
    assert done.returncode == 2 and done.stderr.startswith(
        "error: [OPEN_FILES_LIMIT] this process may have 256 files open"
    )
    assert "ulimit -n 65536" in done.stderr
    assert not (tmp_path / "data").exists()
