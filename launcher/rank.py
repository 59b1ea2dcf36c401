"""What a rank's process is given before anything heavy is imported."""

from collections.abc import MutableMapping
from dataclasses import dataclass

from launcher.stop import StopRequest
from launcher.topology import Topology


@dataclass(frozen=True)
class RankProcess:
    """The trainer of one rank, as its entry point made it."""

    topology: Topology
    environ: MutableMapping[str, str]
    keeper_fd: int
    """Write end of the pipe that the keeper waits on; the writer inherits it."""
    stop: StopRequest
    """Installed already."""
