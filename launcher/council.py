"""How the ranks meet, and how they say the same thing before any collective can run.

Rank 0 holds a TCP store; every rank reports to it, rank 0 decides, all learn the decision. So an
error that only one rank has ends all of them at once, with one message: nobody is left waiting in
a collective for a rank that has gone.
"""

import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed

from launcher import meeting
from launcher.config import Settings
from launcher.errors import ConfigError, LauncherError
from launcher.schema import first_difference
from launcher.topology import Topology

T = TypeVar("T")

MEETING_TIMEOUT = timedelta(minutes=10)
"""Used by ranks whose settings do not say another."""

_SCONTROL_SECONDS = 30


class RendezvousError(LauncherError):
    """The ranks could not meet. Each rank that finds out says so itself."""


class Council:
    """Decisions of all ranks over the store. Every method is collective and blocks."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store = store
        self._rank = rank
        self._world_size = world_size

    def settle_settings(
        self, composed: Settings | ConfigError, versions: Mapping[str, str]
    ) -> Settings:
        """Return this rank's settings, once every rank has the same, and the same libraries.

        Raises:
            ConfigError: on all ranks, with the same message: what some rank could not compose, or
                the first version or setting in which some rank differs from rank 0.
        """
        if isinstance(composed, ConfigError):
            report: dict[str, Any] = {"error": str(composed)}
        else:
            report = {"settings": composed.as_dict(), "versions": versions}
        self._decide("settings", json.dumps(report), _compare_settings)
        assert isinstance(composed, Settings)
        return composed

    def settle(
        self, phase: str, error: str | None, kind: type[LauncherError] = ConfigError
    ) -> None:
        """Go on only if no rank has an error.

        Args:
            phase: a name that is used once.
            kind: what to raise.

        Raises:
            LauncherError: of that kind, on all ranks, with the message of the lowest rank that
                has one.
        """
        self._decide(phase, error or "", lambda reports: next(filter(None, reports), ""), kind)

    def settled(
        self, phase: str, action: Callable[[], T], kind: type[LauncherError] = ConfigError
    ) -> T:
        """Return what `action` returns on this rank; raise on all ranks what it raises on any.

        Args:
            phase: a name that is used once.
            kind: what it may raise.
        """
        result: list[T] = []
        message = None
        try:
            result.append(action())
        except kind as error:
            message = str(error)
        self.settle(phase, message, kind)
        return result[0]

    def ask_rank_0(self, phase: str, action: Callable[[], str]) -> str:
        """Return on every rank the text that `action` returns on rank 0, where alone it is called.

        Args:
            phase: a name that is used once.
        """
        if self._rank == 0:
            self.store.set(f"{phase}/said", action())
        said: str = self.store.get(f"{phase}/said").decode()
        return said

    def _decide(
        self,
        phase: str,
        report: str,
        decide: Callable[[Sequence[str]], str],
        kind: type[LauncherError] = ConfigError,
    ) -> None:
        self.store.set(f"{phase}/{self._rank}", report)
        if self._rank == 0:
            reports = self._reports(phase)
            self.store.set(f"{phase}/decision", decide([text.decode() for text in reports]))
        decision = self.store.get(f"{phase}/decision").decode()
        if decision:
            self._wait_until_all_know(phase)
            error = kind(decision)
            error.settled = True
            raise error

    def _reports(self, phase: str) -> list[bytes]:
        """Wait for every rank's report, or say who is missing."""
        keys = self._keys(phase)
        try:
            reports: list[bytes] = self.store.multi_get(keys)
        except (distributed.DistError, RuntimeError) as error:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise RendezvousError(
                f"{len(missing)} of {self._world_size} ranks did not come ({phase}): rank "
                f"{', '.join(map(str, missing[:8]))}{' ...' if len(missing) > 8 else ''}. Were as "
                "many started as the hostfile or the step says? The other hosts' output tells why."
            ) from error
        return reports

    def _wait_until_all_know(self, phase: str) -> None:
        """The store ends with rank 0, so rank 0 must not end before the others have read it."""
        self.store.set(f"{phase}/known/{self._rank}", "")
        if self._rank == 0:
            self.store.multi_get(self._keys(f"{phase}/known"))

    def _keys(self, prefix: str) -> list[str]:
        return [f"{prefix}/{rank}" for rank in range(self._world_size)]


def meet(
    topology: Topology,
    environ: Mapping[str, str],
    place: Path | None = None,
    timeout: timedelta = MEETING_TIMEOUT,
) -> Council:
    """Connect to rank 0's store, or hold it. Blocks until rank 0 is there.

    Args:
        place: the file by which the ranks agree on a port; None for the environment's port.
        timeout: for this, and then for every decision of the council.

    Raises:
        RendezvousError: the port is taken, or rank 0 cannot be reached.
    """
    host = topology.master_addr or _address_of_node(topology.master_node or "")
    # torchrun's agent holds a store of its own on that port, for all ranks.
    holds = topology.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    port, listen_fd = topology.master_port, environ.get("EVERSTEP_LISTEN_FD") if holds else None
    if place is not None and holds:
        listener = meeting.listen()
        port, listen_fd = listener.getsockname()[1], str(listener.detach())
        meeting.publish(place, port)
    elif place is not None:
        port = _port_of_rank_0(place, timeout)
    try:
        store = distributed.TCPStore(
            host,
            port,
            topology.world_size,
            is_master=holds,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=int(listen_fd) if listen_fd else None,
        )
    except (distributed.DistError, RuntimeError) as error:
        what = (
            f"cannot listen on port {port}: another program has it"
            if holds
            else f"cannot reach rank 0 at {host}:{port}"
        )
        raise RendezvousError(
            f"{what} ({str(error).splitlines()[0]}). Choose another port: --master_port under "
            "deepspeed, MASTER_PORT in the environment elsewhere."
        ) from error
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = distributed.PrefixStore(f"everstep/{restarts}", store)
    return Council(store, topology.rank, topology.world_size)


def _port_of_rank_0(place: Path, timeout: timedelta) -> int:
    port = meeting.find(place, timeout.total_seconds())
    if port is None:
        raise RendezvousError(
            f"rank 0 did not say within {timeout} where it listens: {place} did not appear. Either "
            "rank 0 did not start, or this host does not see the run directory."
        )
    return port


def _compare_settings(reports: Sequence[str]) -> str:
    contents = [json.loads(report) for report in reports]
    for content in contents:
        if "error" in content:
            return str(content["error"])
    for rank, content in enumerate(contents):
        difference = first_difference(contents[0]["versions"], content["versions"])
        if difference:
            name, ours, theirs = difference
            return (
                f"the ranks run different versions of {name}:\n"
                f"  rank 0: {ours}\n"
                f"  rank {rank}: {theirs}\n"
                "  Install the same on all hosts: the same bits come from the same code only."
            )
        difference = first_difference(contents[0]["settings"], content["settings"])
        if difference:
            key, ours, theirs = difference
            return (
                f"the ranks were given different settings; the first that differs is {key}\n"
                f"  rank 0: {ours!r}\n"
                f"  rank {rank}: {theirs!r}\n"
                "  A remote shell may have changed an argument on its way: put such settings into "
                "a file of conf/experiment and give experiment=NAME, or start with "
                "launch=deepspeed, where no shell changes them."
            )
    return ""


def _address_of_node(node: str) -> str:
    """Return where a Slurm node can be reached; its name need not resolve, its NodeAddr does.

    Raises:
        RendezvousError: Slurm does not say, and the name does not resolve either.
    """
    if shutil.which("scontrol"):
        try:
            shown = subprocess.run(
                ["scontrol", "-o", "show", "node", node],
                capture_output=True,
                text=True,
                timeout=_SCONTROL_SECONDS,
                check=True,
            ).stdout
            return next(w for w in shown.split() if w.startswith("NodeAddr=")).split("=", 1)[1]
        except (subprocess.SubprocessError, StopIteration):
            pass  # the controller may be away for a moment; the name may still resolve
    try:
        return socket.gethostbyname(node)
    except OSError as error:
        raise RendezvousError(
            f"cannot find the address of Slurm node {node!r}, where rank 0 runs: scontrol does "
            "not say, and the name does not resolve. Set MASTER_ADDR in the environment."
        ) from error
