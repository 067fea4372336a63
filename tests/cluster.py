"""A standalone cluster of Spark for tests, from the pyspark package itself: a master, and workers of one core each.

`Cluster` is on loopback; `Hosts` gives each worker a network and a view of the disk of its own (network and mount
namespaces, as root): hosts that share nothing but what is bound into them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Final

import psutil

from engine_process import wait_until
from headwater.testing.servers import free_port

PACKAGE: Final = "org.apache.spark.deploy"
LOOPBACK: Final = "127.0.0.1"
HOSTS: Final = 2  # that workers can be started on
SUBNET: Final = "10.77.213"


class Cluster:
    """A master and workers; all know a secret, as the engine does by `environment`."""

    def __init__(self, place: Path, *, workers: int = 2, hidden: dict[int, Path] | None = None) -> None:
        """`hidden`: the folder that a worker, by its number, does not see: it has an empty one instead."""
        place.mkdir()
        self.place = place
        self.address = LOOPBACK
        self.port = free_port()
        self.secret = secrets.token_hex(16)
        self.workers = workers
        self.hidden = hidden or {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"spark://{self.address}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """For an engine that is to run on it."""
        return {"HEADWATER_SPARK_SECRET": self.secret}

    def __enter__(self) -> Cluster:
        self.launch("master", f"{PACKAGE}.master.Master", "--host", self.address, "--port", str(self.port))
        wait_until(lambda: "Starting Spark master" in self.log("master"), 90, "the master's start")
        for number in range(self.workers):
            self.start_worker(number)
        for number in range(self.workers):
            self.await_worker(number)
        return self

    def start_worker(self, number: int) -> None:
        self.launch(
            f"worker{number}", f"{PACKAGE}.worker.Worker", "--host", self.host_of(number), "-c", "1", "-m", "1g",
            self.url, wrapper=self.wrapper(number),
        )  # fmt: skip

    def await_worker(self, number: int) -> None:
        name = f"worker{number}"
        wait_until(lambda: "Successfully registered with master" in self.log(name), 90, "the worker's start")

    def host_of(self, number: int) -> str:
        return self.address

    def wrapper(self, number: int) -> list[str]:
        folder = self.hidden.get(number)
        if folder is None:
            return []
        name = f"hidden{number}"
        command = f'hostname {name} && mount -t tmpfs tmpfs "{folder}" && exec "$@"'
        return ["unshare", "--mount", "--uts", "--propagation", "private", "bash", "-c", command, "bash"]

    def launch(self, name: str, *arguments: str, wrapper: list[str] | None = None) -> None:
        import pyspark

        from headwater.spark.java import find_java

        home = Path(pyspark.__file__).parent
        environment = {
            **os.environ,
            **find_java(),
            "SPARK_HOME": str(home),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_WORKER_DIR": str(self.place / name),
            "SPARK_LOCAL_IP": self.host_of(int(name[-1])) if name[-1].isdigit() else self.address,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-Dspark.authenticate=true -Dspark.network.crypto.enabled=true",
            "_SPARK_AUTH_SECRET": self.secret,
        }
        with (self.place / f"{name}.log").open("wb") as out:
            command = [*(wrapper or []), str(home / "bin" / "spark-class"), *arguments, "--webui-port", "0"]
            if "Worker" in arguments[0]:  # its master's address comes last
                command = [*command[:-3], "--webui-port", "0", command[-3]]
            self.processes[name] = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, start_new_session=True
            )

    def log(self, name: str) -> str:
        return (self.place / f"{name}.log").read_text(errors="replace")

    def executors(self) -> list[psutil.Process]:
        found = []
        for name, process in self.processes.items():
            if name == "master" or not psutil.pid_exists(process.pid):
                continue
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # a Python worker that has just ended
                    if "CoarseGrainedExecutorBackend" in " ".join(child.cmdline()):
                        found.append(child)
        return found

    def stop_worker(self, number: int) -> None:
        self._kill(self.processes.pop(f"worker{number}"))

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            family: list[Any] = [*psutil.Process(process.pid).children(recursive=True), process]
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        process.wait(30)

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            self._kill(process)


class Hosts(Cluster):
    """The same with a network for each worker, and nothing of the tests' disk: only the environment, and what is
    `bound`. The engine and the master are on the bridge's own address."""

    def __init__(self, place: Path, *, workers: int = 2, hide: Path, bound: dict[int, Path] | None = None) -> None:
        super().__init__(place, workers=workers)
        self.address = f"{SUBNET}.1"
        self.hide = hide
        self.bound = bound or {}
        self.tag = uuid.uuid4().hex[:5]

    def host_of(self, number: int) -> str:
        return f"{SUBNET}.{11 + number}"

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)

    def __enter__(self) -> Hosts:
        try:
            self._ip("link", "add", f"hwb{self.tag}", "type", "bridge")
            self._ip("addr", "add", f"{self.address}/24", "dev", f"hwb{self.tag}")
            self._ip("link", "set", f"hwb{self.tag}", "up")
            for number in range(HOSTS):
                self._add_host(number)
            super().__enter__()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add_host(self, number: int) -> None:
        space, link = f"hw{self.tag}{number}", f"v{self.tag}{number}"
        self._ip("netns", "add", space)
        self._ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        self._ip("link", "set", link, "master", f"hwb{self.tag}", "up")
        self._ip("-n", space, "addr", "add", f"{self.host_of(number)}/24", "dev", "eth0")
        self._ip("-n", space, "link", "set", "eth0", "up")
        self._ip("-n", space, "link", "set", "lo", "up")

    def wrapper(self, number: int) -> list[str]:
        """Its own name, and an empty folder in place of the one that is hidden, but for what is bound into it."""
        name = f"hwhost{number}"
        hosts = self.place / f"hosts{number}"
        hosts.write_text(f"{LOOPBACK} localhost\n{self.host_of(number)} {name}\n")
        keep = self.place / f"keep{number}"
        keep.mkdir()
        steps = [f"hostname {name}", f'mount --bind "{hosts}" /etc/hosts', f'mount --bind "{self.hide}" "{keep}"']
        steps.append(f'mount -t tmpfs tmpfs "{self.hide}"')
        if (shared := self.bound.get(number)) is not None:
            inner = shared.relative_to(self.hide)
            steps += [f'mkdir -p "{shared}"', f'mount --bind "{keep}/{inner}" "{shared}"']
        steps.append('exec "$@"')
        shell = ["unshare", "--mount", "--uts", "--propagation", "private", "bash", "-c", " && ".join(steps), "bash"]
        return ["ip", "netns", "exec", f"hw{self.tag}{number}", *shell]

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for number in range(HOSTS):
            with contextlib.suppress(subprocess.CalledProcessError):
                self._ip("netns", "del", f"hw{self.tag}{number}")
        with contextlib.suppress(subprocess.CalledProcessError):
            self._ip("link", "del", f"hwb{self.tag}")


def no_namespaces() -> str:
    """Why hosts of one's own cannot be had here; empty if they can."""
    if os.geteuid() != 0:
        return "namespaces are for root"
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "no ip or unshare"
    done = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True)
    return "" if done.returncode == 0 else "no namespaces here"
