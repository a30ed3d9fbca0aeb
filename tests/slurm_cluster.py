"""A real Slurm on this machine for tests: a controller and two nodes, of one host or of two in network namespaces.

Debian's slurm-wlm without systemd, cgroups or accounting. Every daemon is a child of the test, in the foreground, with
its files in one folder; whatever else Slurm starts carries SLURM_CONF of that folder and is ended by it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from debian import WAIT_FOR_APT
from launching import free_ports
from phalanx.cluster.network import command_line

PACKAGES = ("slurm-wlm", "munge")
NODES = ("node-a", "node-b")
CPUS = 4
MEMORY_MIB = 4000

_CONF = """
ClusterName=phalanx
SlurmctldHost={host}({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdTimeout=5
MessageTimeout=5
KillWait=5
DefMemPerCPU=100
MinJobAge=3
CompleteWait=0
MpiDefault=none
SlurmdParameters=config_overrides
{nodes}
PartitionName=debug Nodes=node-a,node-b Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=node-a MaxTime=1 State=UP
"""


class SlurmCluster:
    """A running cluster. Commands find it by `environment`."""

    def __init__(self, folder: Path, *, two_hosts: bool = False) -> None:
        """Start it and wait until both nodes are idle.

        Args:
            folder: An empty folder with a short name, for everything it writes.
            two_hosts: Whether each node is a host of its own: a network namespace with one interface.
        """
        self.folder = folder
        self._hosts = _Hosts() if two_hosts else None
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        addresses = self._hosts.addresses if self._hosts else ("127.0.0.1", "127.0.0.2")
        names = NODES if self._hosts else (socket.gethostname(),) * 2
        ports = free_ports(3)
        nodes = [
            f"NodeName={node} NodeHostname={name} NodeAddr={address} Port={port} CPUs={CPUS} RealMemory={MEMORY_MIB}"
            for node, name, address, port in zip(NODES, names, addresses, ports[1:], strict=True)
        ]
        controller = self._hosts.gateway if self._hosts else "127.0.0.1"
        text = _CONF.format(
            host=socket.gethostname(), controller=controller, folder=self.folder, ports=ports, nodes="\n".join(nodes)
        )
        (self.folder / "slurm.conf").write_text(text)
        self._start_munge()
        self._spawn("slurmctld", ["slurmctld", "-D", "-i"])
        for node in NODES:
            self.start_node(node)
        self.wait_idle()

    def _start_munge(self) -> None:
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._spawn("munged", ["munged", "--foreground", "--force", *options, f"--seed-file={self.folder}/munge.seed"])
        _until(lambda: (self.folder / "munge.socket").exists(), "munged")

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env={**os.environ, **self.environment}, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )

    def start_node(self, node: str) -> None:
        """Start a node's daemon, and plug its host in."""
        command = ["slurmd", "-D", "-N", node]
        if self._hosts:
            self._hosts.plug(NODES.index(node), up=True)
            command = self._hosts.inside(NODES.index(node), command)
        self._spawn(node, command)

    def kill_node(self, node: str) -> None:
        """Lose a node: unplug its host, and SIGKILL its daemon and everything that runs there."""
        if self._hosts:
            self._hosts.plug(NODES.index(node), up=False)
        self._daemons[node].kill()
        self._daemons.pop(node).wait()
        mark = f"SLURMD_NODENAME={node}\0".encode()
        tasks = [pid for pid in self._pids() if mark in _environment(pid)]
        # The processes that watch over tasks would tell the controller how those ended, so they go first.
        parents = {_parent_of(pid) for pid in tasks}
        for pid in [*(pid for pid in parents if "slurmstepd" in command_line(pid)), *tasks]:
            _kill(pid)

    def wait_idle(self) -> None:
        """Wait until both nodes can take jobs."""
        _until(lambda: self.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%T").split() == ["idle"] * 2, "the nodes")

    def run(self, *command: str) -> str:
        """Run a command of Slurm; returns what it says, empty while it fails."""
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=30
        )
        return done.stdout

    def stop(self) -> None:
        """End everything the cluster started, and take its hosts away."""
        # The controller has children of its own, which it ends itself when it is asked.
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            daemon.wait(10)
        while pids := list(self._pids()):
            for pid in pids:
                _kill(pid)
            time.sleep(0.02)
        if self._hosts:
            self._hosts.remove()

    def _pids(self) -> Iterator[int]:
        mark = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid() and mark in _environment(int(name)):
                yield int(name)


class _Hosts:
    """Two hosts as network namespaces, joined to this one by a bridge."""

    def __init__(self) -> None:
        self._id = f"px{os.getpid() % 100000}"
        third = 1 + os.getpid() % 250
        self.gateway = f"10.231.{third}.254"
        self.addresses = (f"10.231.{third}.1", f"10.231.{third}.2")
        try:
            _ip("link", "add", self._id, "type", "bridge")
            _ip("addr", "add", f"{self.gateway}/24", "dev", self._id)
            _ip("link", "set", self._id, "up")
            for number, address in enumerate(self.addresses):
                self._add(number, address)
        except BaseException:
            self.remove()
            raise

    def _add(self, number: int, address: str) -> None:
        space, outside = f"{self._id}-{number}", f"{self._id}{number}"
        _ip("netns", "add", space)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", outside, "master", self._id, "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        for name in ("eth0", "lo"):
            _ip("-n", space, "link", "set", name, "up")

    def plug(self, number: int, *, up: bool) -> None:
        """Put the cable in or pull it out."""
        _ip("link", "set", f"{self._id}{number}", "up" if up else "down")

    def inside(self, number: int, command: Sequence[str]) -> list[str]:
        """Return a command that runs `command` on a host, under the host's name."""
        # Not `ip netns exec`: it mounts /sys anew, without the cgroups that slurmd looks for.
        enter = ["nsenter", f"--net=/run/netns/{self._id}-{number}", "unshare", "--uts"]
        return [*enter, "sh", "-c", 'hostname "$0"; exec "$@"', NODES[number], *command]

    def remove(self) -> None:
        """Take the hosts and the bridge away, whatever there is of them."""
        for number in range(2):
            if Path(f"/run/netns/{self._id}-{number}").exists():
                _ip("netns", "del", f"{self._id}-{number}")
        if Path(f"/sys/class/net/{self._id}").exists():
            _ip("link", "del", self._id)


def require_slurm(*, two_hosts: bool = False) -> None:
    """Skip the test where no Slurm can be had, or no hosts can be made; installs Debian's packages when root."""
    if os.geteuid() != 0:
        pytest.skip("a Slurm of the test's own needs root")
    if shutil.which("slurmctld") is None or shutil.which("munged") is None:
        _install()
    if two_hosts and subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("network namespaces are not allowed here")


def _install() -> None:
    if shutil.which("apt-get") is None:
        pytest.skip("slurm-wlm and munge are not installed, and there is no apt-get")
    command = ["apt-get", "install", "-y", "--no-install-recommends", "-o", WAIT_FOR_APT, *PACKAGES]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    )
    if done.returncode:
        pytest.skip(f"{' '.join(command)} failed: {done.stderr[-300:]}")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _until(condition: object, what: str, timeout_s: float = 30.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come up in {timeout_s} s"
        time.sleep(0.05)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _parent_of(pid: int) -> int:
    """Return the parent of a process, 0 for one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
