"""An archive of Spark's classes for the JVM (class data sharing): half of the CPU of a start goes into loading them.

`python -m headwater.spark.archive` makes it once per environment, in about a minute, by running a small pipeline; the
set-up script does so. `session.py` uses it if it is there. The JVM checks by itself that Java and the jars are still
the same, and goes on without it if not. It lies in the environment (`sys.prefix`) because it names the jars by path.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Final

import psutil

DUMP_S: Final = 120.0  # the JVM writes the archive when it ends
PIPELINE: Final = """
CREATE TABLE a (id BIGINT PRIMARY KEY, b BIGINT, c DECIMAL(12,2), d STRING);
CREATE TABLE b (id BIGINT PRIMARY KEY, d STRING);
INSERT INTO a SELECT id, id % 7, id, 'x' FROM range(100);
INSERT INTO b SELECT id, concat('g', id % 3) FROM range(7);
CREATE MATERIALIZED VIEW v AS SELECT b.d, sum(c) AS s, count(*) AS n FROM a JOIN b ON a.b = b.id GROUP BY b.d;
CREATE MATERIALIZED VIEW w AS SELECT b, max(c) AS m FROM a GROUP BY b;
INSERT INTO a VALUES (1000, 3, 5, 'y');
UPDATE a SET c = c + 1 WHERE id = 5;
DELETE FROM a WHERE id = 6;
FLUSH;
SELECT * FROM v ORDER BY d;
"""


def archive_path(java_home: str) -> Path:
    return Path(sys.prefix) / "share" / "headwater" / f"spark-{zlib.crc32(java_home.encode()):08x}.jsa"


def java_options(java_home: str) -> list[str]:
    """What a JVM is given to use the archive; nothing if there is none."""
    path = archive_path(java_home)
    if not path.exists() or " " in str(path):
        return []
    # An archive that does not fit any more is nothing to warn about.
    return [f"-XX:SharedArchiveFile={path}", "-Xshare:auto", "-Xlog:disable", "-Xlog:all=error:stderr"]


def make() -> Path:
    """Make the archive, by a process whose JVM writes it as it ends."""
    from headwater.spark.java import find_java

    path = archive_path(find_java()["JAVA_HOME"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / "archive"
        done = subprocess.run(
            [sys.executable, "-m", "headwater.spark.archive", str(part)], stdout=subprocess.PIPE, text=True, check=True
        )
        java = int(done.stdout.split()[-1])
        deadline = time.monotonic() + DUMP_S
        while psutil.pid_exists(java):
            if time.monotonic() > deadline:
                raise TimeoutError("the JVM has not finished the archive")
            time.sleep(0.2)
        part.replace(path)
    return path


def exercise(part: Path) -> int:
    """Load what an engine uses, in a JVM that writes its classes to `part` when it ends; gives the JVM's process."""
    from headwater import Engine
    from headwater.spark.session import make_session

    options = f"-XX:ArchiveClassesAtExit={part} -Xlog:disable -Xlog:all=error:stderr"
    session = make_session("local[2]", {"spark.driver.extraJavaOptions": options})
    with tempfile.TemporaryDirectory() as folder, Engine(folder, master="local[2]") as engine:
        engine.execute(PIPELINE)
        pid: int = session.sparkContext._jvm.ProcessHandle.current().pid()
    return pid


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(exercise(Path(sys.argv[1])))
    else:
        print(make())
