"""`python -m launcher [overrides]`, also installed as `everstep`.

Decides from the environment whether this process is a rank or the one that starts the ranks, and
does no more than that before it forks: a rank's outer process becomes its keeper, which must stay
small. Imports nothing heavy. `everstep status` and its like are tools: neither.
"""

import os
import sys

from launcher import keeper, overrides, packages, requeue, tools, topology
from launcher.errors import ConfigError
from launcher.rank import RankProcess
from launcher.stop import StopRequest


def main() -> int:
    """Run this process to its end and return its exit code."""
    try:
        packages.check()
        if tools.is_tool(sys.argv[1:]):
            return tools.run(sys.argv[1:])
        command = overrides.parse(sys.argv[1:])
        os.environ.update(command.environ)
        place = topology.detect(os.environ)
        if command.local_rank is not None:
            topology.check_local_rank(command.local_rank, place)
    except ConfigError as error:
        print(f"everstep: {error}", file=sys.stderr)
        return requeue.BAD_CONFIG
    process = None
    if place is not None:
        starter = os.environ.get("EVERSTEP_STARTER_PID")
        keeper_fd = keeper.keep(int(starter) if starter else None)
        # From here on this is the trainer, in the keeper's child.
        stop = StopRequest()
        stop.install()
        process = RankProcess(place, os.environ, keeper_fd, stop)
    from launcher import train

    return train.main(command, os.environ, process)


if __name__ == "__main__":
    sys.exit(main())
