"""Hosts of a cluster in the namespaces of one machine, with a network that tests cut and damage.

A host is a process in its own network, host name, process and mount namespaces; a switch is one
more, which holds a bridge for every network. All of them end with the test's process, however it
ends, and take their processes and interfaces along: nothing has a name outside of the namespaces.

A host finds the others by name, and its own name at 127.0.1.1, as Debian installs it.
"""

import contextlib
import ctypes
import functools
import json
import multiprocessing as mp
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.ranks.process import die_with_parent

__all__ = ["DATA", "Host", "Hosts", "Network", "Task", "delay_refusal", "open_hosts", "refusal"]

ROOT = Path(__file__).resolve().parents[2]
_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")
_NAMESPACES = {
    "time": 0x00000080,
    "net": 0x40000000,
    "uts": 0x04000000,
    "mnt": 0x00020000,
    "pid": 0x20000000,
}
_LAUNCHERS = (
    "GLOO_",
    "NCCL_",
    "RANK",
    "LOCAL_",
    "WORLD_",
    "NODE_",
    "MASTER_",
    "TORCHELASTIC_",
    "GROUP_",
)
_PRELOAD = ["lightning_par.cli", "lightning_par.strategies", "tests.support.parity"]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network to which every host has an interface.

    Attributes:
        ipv4: First three numbers of the addresses; None: no such addresses.
        ipv6: First groups of the addresses; None: no such addresses.
        leads_somewhere: Whether the hosts reach each other over it.
        delay: Seconds from one host to another; see `delay_refusal`.
    """

    ipv4: str | None = "10.77.0"
    ipv6: str | None = None
    leads_somewhere: bool = True
    delay: float = 0

    def addresses(self, host: int) -> list[str]:
        """Addresses of a host, without their prefix lengths; that of IPv4 first."""
        four = [] if self.ipv4 is None else [f"{self.ipv4}.{host + 1}"]
        return four + ([] if self.ipv6 is None else [f"{self.ipv6}::{host + 1}"])


DATA = Network()


@functools.cache
def refusal() -> str | None:
    """Say why this machine can make no hosts; None if it can."""
    if sys.platform != "linux":
        return "hosts are namespaces of Linux"
    if absent := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"hosts need {', '.join(absent)}"
    if os.geteuid() != 0:
        return "making hosts needs root"
    make = "ip link add veth0 type veth peer name veth1 && ip link add net0 type bridge"
    words = ["unshare", "-n", "-u", "-m", "-p", "-f", "sh", "-c", make]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        return "this kernel or container makes no namespaces, veths and bridges"
    return None


def delay_refusal() -> str | None:
    """Say why this machine can make no network with a delay; None if it can."""
    # tc's own way to delay packets, netem, is not in every kernel.
    if shutil.which("gcc") is None or not Path("/dev/net/tun").exists():
        return "a network with a delay needs gcc and /dev/net/tun"
    return refusal()


@dataclass(eq=False)
class Task:
    """Something that was started on a host.

    Attributes:
        host: Where.
        log: File with all that it says.
        handle: A `subprocess.Popen` or a `multiprocessing.Process`.
        ended: When it was seen to have ended, in seconds of `time.monotonic`.
    """

    host: "Host"
    log: Path
    handle: Any
    ended: float | None = None

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        poll = getattr(self.handle, "poll", None)
        code: int | None = self.handle.exitcode if poll is None else poll()
        if code is not None and self.ended is None:
            self.ended = time.monotonic()
        return code

    def text(self) -> str:
        """Return what it has said so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@dataclass(eq=False)
class Host:
    """A host.

    Attributes:
        number: 0 to the number of hosts less one.
        name: Host name.
        folder: Of its logs and its temporary files.
        anchor: Process that holds its namespaces.
        networks: To which it has interfaces, eth0 the first.
        switch: Namespace with the other ends.
    """

    number: int
    name: str
    folder: Path
    anchor: "_Anchor"
    networks: Sequence[Network]
    switch: "_Anchor"
    tasks: list[Task] = field(default_factory=list)

    def address(self, network: int = 0, version: int = 4) -> str:
        """Return an address of this host."""
        found = self.networks[network].addresses(self.number)
        return found[0] if version == 4 else found[-1]

    def run(self, command: Sequence[Any], **variables: Any) -> Task:
        """Start a command."""
        log = self.folder / f"{len(self.tasks)}.log"
        words = ["env", f"--chdir={self.folder}", *map(str, command)]
        with log.open("wb") as said:
            handle = subprocess.Popen(
                self.anchor.enter(words),
                env=self._environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        return self._started(log, handle)

    def fork(self, function: Callable[..., Any], *arguments: Any, **variables: Any) -> Task:
        """Call a function, in a process forked from one that has torch and Lightning in memory."""
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOAD, __name__])
        log = self.folder / f"{len(self.tasks)}.log"
        given = self.anchor.pid, log, self._environment(variables), function, arguments
        handle = context.Process(target=_in_namespaces, args=given)
        handle.start()
        return self._started(log, handle)

    def _started(self, log: Path, handle: Any) -> Task:
        self.tasks.append(Task(self, log, handle))
        return self.tasks[-1]

    def _environment(self, variables: Mapping[str, Any]) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
        path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
        fixed = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        return {**kept, **fixed, **{k: str(v) for k, v in variables.items()}}

    @property
    def temporary(self) -> Path:
        """Folder of its temporary files."""
        return self.folder / "tmp"

    def processes(self) -> list[int]:
        """Return the processes on this host, but for its first one, as seen from outside."""
        found, own = [], Path(f"/proc/{self.anchor.pid}/ns/pid").readlink()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                # The first process is no init: what it has inherited stays there, ended.
                has_ended = "State:\tZ" in (entry / "status").read_text()
                if (entry / "ns/pid").readlink() == own and not has_ended:
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self.anchor.pid]

    def signal(self, number: int) -> None:
        """Send a signal to every process on this host, as to freeze or to kill all of them."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def cut(self, network: int = 0) -> None:
        """Unplug this host from a network, at the switch: it sees no packets, and no other sign."""
        self.switch.ip(f"link set {_port(network, self.number)} nomaster")

    def join(self, network: int = 0) -> None:
        """Plug this host in again."""
        self.switch.ip(f"link set {_port(network, self.number)} master net{network}")

    def limit(self, bits: int, network: int = 0) -> None:
        """Let this host send and receive so many bits a second at most."""
        rate = f"tc qdisc add dev %s root tbf rate {bits} burst 64kb latency 100ms"
        self.anchor.call(rate % f"eth{network}")
        self.switch.call(rate % _port(network, self.number))

    def lose(self, fraction: float, network: int = 0) -> None:
        """Drop a part of the packets in both directions, at random, each of TCP's by itself."""
        # tc's own way to lose packets, netem, is not in every kernel; this is: load a random
        # number; if it is at least `bound`, let the packet pass (0), else drop it (2).
        bound = int(fraction * 2**32)
        drop = f"4,32 0 0 4294963256,53 0 1 {bound},6 0 0 0,6 0 0 2"
        for place, name in (
            (self.anchor, f"eth{network}"),
            (self.switch, _port(network, self.number)),
        ):
            place.ip(f"link set {name} gso_max_segs 1")  # else up to 64 KiB would be lost at once
            place.call(f"tc qdisc add dev {name} clsact")
            place.call(f"tc filter add dev {name} ingress bpf da bytecode '{drop}'")

    def hide(self, folder: Path) -> None:
        """Give this host a folder of its own in the place of one that all hosts share."""
        self.anchor.call(f"mount -t tmpfs own {folder}", "-m")

    def bytes_sent(self, network: int = 0) -> int:
        """Return what its interface has sent so far, headers included."""
        said = self.anchor.call(f"ip -j -s link show dev eth{network}")
        return int(json.loads(said)[0]["stats64"]["tx"]["bytes"])

    def left(self, seconds: float = 10) -> list[str]:
        """Return what is left of finished tasks: processes, temporary files, listening sockets.

        A process whose parent has ended may take some seconds to end, too.
        """
        deadline = time.monotonic() + seconds
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _left(self) -> list[str]:
        found = [f"process {pid}: {_command_of(pid)}" for pid in self.processes()]
        found += [f"file {path}" for path in self.temporary.rglob("*")]
        for kind in ("tcp", "tcp6"):
            table = Path(f"/proc/{self.anchor.pid}/net/{kind}").read_text().splitlines()[1:]
            found += [f"socket {line.split()[1]}" for line in table if line.split()[3] == "0A"]
        return found


class Hosts(Sequence[Host]):
    """Hosts on common networks; see `open_hosts`."""

    def __init__(
        self, count: int, folder: Path, networks: Sequence[Network], ahead: float = 0
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._hosts: list[Host] = []
        self._cable, self._ahead = folder / "cable", ahead
        try:
            self._make(count, folder, networks)
        except BaseException:
            self.close()
            raise

    def _make(self, count: int, folder: Path, networks: Sequence[Network]) -> None:
        switch = self._stack.enter_context(_Anchor("switch"))
        if any(network.delay for network in networks):
            source = Path(__file__).with_name("cable.c")
            subprocess.run(["gcc", "-O2", "-o", str(self._cable), str(source)], check=True)
        for network in range(len(networks)):
            # No spanning tree: a port forwards as soon as it is joined.
            switch.ip(f"link add net{network} type bridge stp_state 0")
            switch.ip(f"link set net{network} up")
        for number in range(count):
            name = f"host{number}"
            anchor = self._stack.enter_context(_Anchor(name, round(number * self._ahead)))
            own = folder / name
            (own / "tmp").mkdir(parents=True)
            host = Host(number, name, own, anchor, networks, switch)
            self._hosts.append(host)
            names = _names(number, count, networks)
            (own / "names").write_text(names)
            anchor.call(f"mount --bind {own}/names /etc/hosts", "-m")
            for at, network in enumerate(networks):
                self._lay(host, at, network.delay)
                _plug(host, at, network)
                if network.leads_somewhere:
                    host.join(at)

    def _lay(self, host: Host, at: int, delay: float) -> None:
        """Join a host to the switch by a veth pair, or by what delays each frame by half of it."""
        ends = f"eth{at}", _port(at, host.number)
        if not delay:
            pid = host.anchor.pid
            host.switch.ip(f"link add {ends[1]} type veth peer name {ends[0]} netns {pid}")
            return
        with Path(f"/proc/{host.anchor.pid}/ns/net").open() as place:
            number = place.fileno()
            words = [self._cable, delay / 2 * 1e6, number, *ends]
            cable = subprocess.Popen(
                host.switch.enter([str(word) for word in words]),
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[number],
            )
        self._stack.enter_context(cable)
        self._stack.callback(cable.kill)
        assert cable.stdout is not None
        if cable.stdout.readline() != "ready\n":
            raise OSError(f"no cable to {host.name}")

    def __getitem__(self, number: Any) -> Any:
        return self._hosts[number]

    def __len__(self) -> int:
        return len(self._hosts)

    def wait(self, seconds: float) -> list[int | None]:
        """Wait until all tasks have ended, so long at most; return their exit codes, by host."""
        deadline = time.monotonic() + seconds
        tasks = [task for host in self for task in host.tasks]
        while any(task.code is None for task in tasks) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [task.code for task in tasks]

    def texts(self) -> str:
        """Return what all tasks said, for a failing test."""
        logs = [(task.log, task.text()) for host in self for task in host.tasks]
        return "\n".join(f"--- {log.parent.name}/{log.name}\n{text}" for log, text in logs)

    def close(self) -> None:
        """End every process and remove the hosts."""
        # First who waits for a process of a host: its end is not complete before.
        for task in [task for host in self for task in host.tasks]:
            task.handle.kill()
            (task.handle.wait if isinstance(task.handle, subprocess.Popen) else task.handle.join)()
        self._stack.close()


@contextlib.contextmanager
def open_hosts(
    count: int, folder: Path, networks: Sequence[Network] = (DATA,), *, ahead: float = 0
) -> Iterator[Hosts]:
    """Make hosts, and remove them with all that runs on them.

    Args:
        count: How many.
        folder: For logs and temporary files.
        networks: To which each host has an interface, eth0 to the first.
        ahead: Seconds by which the monotonic clock of a host is ahead of that of the one before.
    """
    hosts = Hosts(count, folder, networks, ahead)
    try:
        yield hosts
    finally:
        hosts.close()


class _Anchor:
    """The first process of namespaces of their own, which end with it, as it does with this one."""

    def __init__(self, name: str, ahead: int = 0) -> None:
        kinds = ["--net", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        self._has_clock = bool(ahead)  # not of the time of day, of which Linux has only one
        kinds += ["--time", f"--monotonic={ahead}", f"--boottime={ahead}"] if ahead else []
        ready = f"hostname {name} && ip link set lo up && echo ready && exec sleep infinity"
        self._outer = subprocess.Popen(
            ["unshare", *kinds, "sh", "-c", ready],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=die_with_parent,
        )
        assert self._outer.stdout is not None
        if self._outer.stdout.readline() != "ready\n":
            raise OSError(f"no namespaces for {name}")
        pid = self._outer.pid
        self.pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def __enter__(self) -> "_Anchor":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._outer.communicate()  # it has waited for the first process, and that for all others

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one in these namespaces."""
        kinds = ["-n", "-u", "-p", "-m", *(["-T"] if self._has_clock else [])]
        return ["nsenter", "-t", str(self.pid), *kinds, *command]

    def call(self, command: str, kinds: str = "-n") -> str:
        """Run a short command in namespaces of some kinds; return what it says."""
        words = ["nsenter", "-t", str(self.pid), kinds, *shlex.split(command)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{command}: {done.stderr}")
        return done.stdout

    def ip(self, words: str) -> None:
        """Run ``ip``."""
        self.call(f"ip {words}")


def _port(network: int, host: int) -> str:
    return f"port{network}.{host}"


def _plug(host: Host, at: int, network: Network) -> None:
    host.switch.ip(f"link set {_port(at, host.number)} up")
    for address in network.addresses(host.number):
        rest = "/64 nodad" if ":" in address else "/24"
        host.anchor.ip(f"addr add {address}{rest} dev eth{at}")
    host.anchor.ip(f"link set eth{at} up")


def _names(number: int, count: int, networks: Sequence[Network]) -> str:
    """Text of /etc/hosts: others are found on the first network that leads to them."""
    leading = next((n for n in networks if n.leads_somewhere), networks[0])
    lines = ["127.0.0.1 localhost", "::1 localhost", f"127.0.1.1 host{number}"]
    others = [other for other in range(count) if other != number]
    lines += [f"{address} host{o}" for o in others for address in leading.addresses(o)]
    return "\n".join([*lines, ""])


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return "ended"


def _in_namespaces(
    anchor: int, log: Path, environment: dict[str, str], function: Any, arguments: Any
) -> None:
    """Call a function in a child that is a process of the host, and end as it does."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    library = ctypes.CDLL(None, use_errno=True)
    places = {kind: Path(f"/proc/{anchor}/ns/{kind}") for kind in _NAMESPACES}
    opened = {
        kind: os.open(place, os.O_RDONLY)
        for kind, place in places.items()
        if place.exists() and place.readlink() != Path(f"/proc/self/ns/{kind}").readlink()
    }
    for kind, namespace in opened.items():
        if library.setns(namespace, _NAMESPACES[kind]):
            raise OSError(ctypes.get_errno(), f"setns {kind}")
        os.close(namespace)
    child = os.fork()  # only a child is in the new process namespace
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) % 256)
    die_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    code = 0
    try:
        function(*arguments)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
