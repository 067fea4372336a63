"""What a command refuses before it makes anything: no folder, no engine, no Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headwater
from headwater.errors import UsageError


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("run --data-dir s3a://bucket/x", "DATA_DIRECTORY_UNSUPPORTED"),
        ("status --data-dir s3://bucket/x", "DATA_DIRECTORY_UNSUPPORTED"),
        ("run --data-dir made --spark-conf spark.sql.ansi.enabled=false", "SPARK_SETTING_REFUSED"),
        ("sql -c FLUSH --data-dir made --spark-conf spark.authenticate=false", "SPARK_SETTING_REFUSED"),
        ("run --data-dir made --master spark://127.0.0.1:7077", "SPARK_SECRET"),
    ],
)
def test_a_command_that_cannot_work_makes_nothing(tmp_path: Path, arguments: str, code: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
    command = [sys.executable, "-m", "headwater.cli", *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: [{code}]")
    assert not list(tmp_path.iterdir())


def test_python_refuses_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="DATA_DIRECTORY_UNSUPPORTED"):
        headwater.Engine("s3://bucket/x")
    with (
        pytest.raises(UsageError, match="SPARK_SETTING_REFUSED"),
        headwater.Engine("made", spark_conf={"spark.sql.session.timeZone": "CET"}),
    ):
        pass
    assert not list(tmp_path.iterdir())
