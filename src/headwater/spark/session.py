"""Makes the Spark session, with the settings that the engine relies on."""

from __future__ import annotations

import contextlib
import locale
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from headwater.errors import DefiniteError, UsageError
from headwater.limits import require_open_files
from headwater.spark.archive import java_options
from headwater.spark.daemon import most_idle_workers
from headwater.spark.java import find_java
from headwater.spark.security import secret_for_spark, security_settings
from headwater.storage.private import UMASK, WORKERS_UMASK, current_umask

LOG_SETTINGS: Final = Path(__file__).with_name("log4j2.properties")
UTF8_LOCALE: Final = "C.UTF-8"  # there without any package, on Debian, Fedora and wherever glibc is of 2022 or newer
POOLS: Final = Path(__file__).with_name("pools.xml")
# A text is what it is: Spark would put values of the environment into `${env:NAME}`, wherever in a statement it stands,
# and take `text.`/path`` for a table. Set in every session again: one beside another may not have inherited them.
UNTOUCHED: Final[dict[str, str]] = {
    "spark.sql.variable.substitute": "false",
    "spark.sql.runSQLOnFiles": "false",
}
SETTINGS: Final[dict[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    **UNTOUCHED,
    "spark.scheduler.mode": "FAIR",
    "spark.scheduler.allocation.file": POOLS.as_uri(),
    # Files are listed one by one from the meta store: listing them must never become a Spark job of its own.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # No bound in bytes: `width.py` says why, and what is done for wide rows.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "8192",
    "spark.sql.execution.arrow.maxBytesPerBatch": str((1 << 31) - 1),
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.hadoop.parquet.compression.codec.zstd.level": "1",
    # Small row groups: a point read decodes little, and the writer holds little.
    "spark.hadoop.parquet.block.size": str(16 * 1024 * 1024),
    # The writer looks for the first time after one row, not after 100: those may be more than the JVM's memory. How
    # many may then pass before it looks again, it finds out by itself.
    "spark.hadoop.parquet.page.size.row.check.min": "1",
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
    "spark.sql.catalogImplementation": "in-memory",
    # Spark keeps 100 pieces of compiled code, and a refresh has some 25: beyond four views each would be compiled again
    # at every barrier, first by Spark and then by the JVM, which took 20 times as long as the refreshes themselves.
    "spark.sql.codegen.cache.maxEntries": "10000",
    "spark.python.worker.reuse": "true",
    "spark.executorEnv.LC_ALL": UTF8_LOCALE,  # names of files, as in `_start_jvm`, also where a cluster starts a JVM
    "spark.python.daemon.module": "headwater.spark.daemon",
    # Spark keeps as many as were ever busy at once; those that were idle for longest end first.
    "spark.python.factory.idleWorkerMaxPoolSize": str(most_idle_workers()),
    "spark.ui.retainedJobs": "2000",
    "spark.sql.ui.retainedExecutions": "50",
}

# Compiled queries are kept (see above), and so is their machine code. A JVM whose space for it is full stops compiling
# and soon fails in Spark's own threads; the space is an address range, which costs nothing until it is used.
CODE_CACHE: Final = "-XX:ReservedCodeCacheSize=512m"
# The optimising compiler is for what runs for each row, not for what runs for each job: with ten times the calls before
# it begins (loops as before) it takes half as much of the first minutes, 3 % of a copy, and views are as fast.
OPTIMISED_LATER: Final = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
)


def make_session(master: str | None, extra: dict[str, str] | None = None, *, log_level: str = "ERROR") -> SparkSession:
    """A session on `local[*]` or a cluster; DefiniteError SPARK_START if there is none to be had."""
    master = master or "local[*]"
    require_open_files()
    java = find_java()
    os.environ.update(java)
    # A worker needs the engine's own interpreter: another one would lack pyarrow and headwater itself.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName("headwater").master(master)
    settings = dict(SETTINGS)
    settings["spark.pyspark.python"] = sys.executable
    if _on_this_machine(master):
        settings["spark.driver.host"] = "127.0.0.1"
        settings["spark.driver.bindAddress"] = "127.0.0.1"
    options = [f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}", *java_options(java.get("JAVA_HOME", ""))]
    options += [CODE_CACHE, *OPTIMISED_LATER, *os.environ.get("HEADWATER_JAVA_OPTIONS", "").split()]
    settings["spark.driver.extraJavaOptions"] = " ".join(options)
    settings["spark.driver.memory"] = os.environ.get("HEADWATER_DRIVER_MEMORY", "2g")
    if master.startswith("local"):
        settings["spark.sql.shuffle.partitions"] = str(max(2, os.cpu_count() or 2))
    settings.update(security_settings(master))
    settings.update(extra or {})
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        with secret_for_spark(master):
            _start_jvm(master, settings)
            session: SparkSession = builder.getOrCreate()
    except UsageError:
        raise
    except Exception as error:
        raise DefiniteError(
            "SPARK_START",
            f"Spark could not be started on {master}",
            detail=str(error).splitlines()[0] if str(error) else type(error).__name__,
            hint="check --master, JAVA_HOME (Java 17 or 21) and free memory",
        ) from error
    session.sparkContext.setLogLevel(log_level)
    _keep_values_out_of_logs()
    return session


def _start_jvm(master: str, settings: dict[str, str]) -> None:
    """Start the driver's JVM if there is none yet, and a context in it, which the session then takes.

    Here and not by the session's builder, for three things: what it writes for itself is its owner's alone; names of
    files are UTF-8 whatever the locale; and signals of a terminal (a closed window, ctrl-C) are for the engine, which
    needs the JVM for its last checkpoint. The JVM ends when the engine's end of a pipe does.
    """
    if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        return
    conf = SparkConf(loadDefaults=False).setAppName("headwater").setMaster(master).setAll(list(settings.items()))
    with _environment(_for_jvm()):
        gateway = launch_gateway(conf, {"umask": UMASK, "start_new_session": True})
    SparkContext(conf=conf, gateway=gateway)


def _for_jvm() -> dict[str, str]:
    """Java takes the encoding of file names from the locale, and C has only ASCII."""
    utf8 = locale.nl_langinfo(locale.CODESET).replace("-", "").upper() == "UTF8"
    return {WORKERS_UMASK: f"{current_umask():o}", **({} if utf8 else {"LC_ALL": UTF8_LOCALE})}


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """For processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, old in before.items():
            os.environ.pop(name) if old is None else os.environ.update({name: old})


def stop_session(session: SparkSession) -> None:
    """Ends Spark; a driver process that is gone already has nothing left to end."""
    with contextlib.suppress(OSError, Py4JError):
        session.stop()


def _on_this_machine(master: str) -> bool:
    """Whether the executors are: they reach the driver by loopback then, and nobody else does.

    Elsewhere Spark finds the driver's address by itself (`SPARK_LOCAL_IP` says it otherwise).
    """
    return master.startswith("local") or urlsplit(master).hostname in ("localhost", "127.0.0.1", "::1")


def _keep_values_out_of_logs() -> None:
    """PySpark logs a failed query with its text and with the value that could not be cast: both may be a secret."""
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True


# For the refresh of a few thousand rows: adaptive execution makes a job of every shuffle, and a broadcast that Spark
# chooses by itself is a job too. Without both a refresh is one job, and one for each set of keys sent to the scans.
QUICK: Final[dict[str, str]] = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    # Spark describes every plan to its listeners before it runs it; of a long one that takes as long as to optimise it.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.debug.maxToStringFields": "1",
    "spark.sql.maxPlanStringLength": "1000",
}


INTERPRETED: Final[dict[str, str]] = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


# For plans in which all is in one task: Spark would move a semi join below the COALESCE(1) that tells it so.
ONE_TASK: Final[dict[str, str]] = {
    "spark.sql.optimizer.excludedRules": "org.apache.spark.sql.catalyst.optimizer.PushDownLeftSemiAntiJoin"
}


CAREFUL: Final[dict[str, str]] = {"spark.sql.execution.arrow.maxBytesPerBatch": str(32 * 1024 * 1024)}


_beside: dict[tuple[SparkSession, frozenset[tuple[str, str]]], SparkSession] = {}
_preparing: dict[SparkSession, Callable[[SparkSession, SparkSession], None]] = {}


def quick_session(
    session: SparkSession, partitions: int, *, interpreted: bool = False, careful: bool = False, one_task: bool = False
) -> SparkSession:
    """A session beside the given one, for small work: no adaptive execution, that many partitions after a shuffle.

    `interpreted`: nothing is compiled, which for a few thousand rows takes longer than the rows. `careful` and
    `one_task`: see there.
    """
    more = {**(INTERPRETED if interpreted else {}), **(CAREFUL if careful else {}), **(ONE_TASK if one_task else {})}
    return _session_beside(session, {**QUICK, **more, "spark.sql.shuffle.partitions": str(partitions)})


def careful_session(session: SparkSession) -> SparkSession:
    """A session beside the given one that bounds what goes to Python in bytes, for wide rows."""
    return _session_beside(session, CAREFUL)


def _session_beside(session: SparkSession, settings: dict[str, str]) -> SparkSession:
    key = (session, frozenset(settings.items()))
    found = _beside.get(key)
    if found is None:
        found = session.newSession()
        for name, value in {**UNTOUCHED, **settings}.items():
            found.conf.set(name, value)
        if prepare := _preparing.get(session):
            prepare(session, found)
        _beside[key] = found
    return found


def sessions_beside(session: SparkSession, prepare: Callable[[SparkSession, SparkSession], None]) -> list[SparkSession]:
    """Those that there are; later ones are prepared by the function before anybody has them."""
    _preparing[session] = prepare
    return [found for (of, _), found in _beside.items() if of is session]
