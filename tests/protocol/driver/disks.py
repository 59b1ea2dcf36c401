"""The nodes' own disks of a chain, one for each rank, and what happens to them."""

import os
import random
import shutil
from pathlib import Path

from engine.format.names import SaveId
from tests.protocol.driver.events import Event
from tests.protocol.driver.faults import DiskFault
from tests.protocol.driver.inspect import LeftError

_MOST_RANKS = 3


class Disks:
    """Directories that stand for the disks."""

    def __init__(self, root: str) -> None:
        self.paths = [os.path.join(root, f"node-{rank}") for rank in range(_MOST_RANKS)]

    def damage(self, fault: DiskFault, draw: random.Random) -> bool:
        """Let `fault` happen to one disk that holds something; False if none does."""
        used = [path for path in self.paths if list(_shards(path))]
        if not used:
            return False
        victim = draw.choice(used)
        if fault is DiskFault.LOST:
            shutil.rmtree(victim, ignore_errors=True)  # a writer may add to it meanwhile
            return True
        shards = list(_shards(victim))
        if not shards:  # a writer has tidied up meanwhile
            return False
        shard = draw.choice(shards)
        try:
            with open(shard, "r+b") as file:
                size = file.seek(0, os.SEEK_END)
                if fault is DiskFault.TRUNCATED:
                    file.truncate(draw.randrange(size) if size else 0)
                elif size:
                    at = draw.randrange(size)
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 1 << draw.randrange(8)]))
        except FileNotFoundError:
            return False
        return True

    def check(self, world_size: int, started: Event) -> None:
        """Raise LeftError for what the ranks of an attempt that `started` should have cleared."""
        for path in self.paths[:world_size]:
            for shard in _shards(path):
                save_id = shard.parent.name
                older = SaveId.parse(save_id).attempt < started["attempt"]
                if older and save_id != started["parent"]:
                    raise LeftError(f"{shard} is left by an older attempt")


def _shards(path: str) -> list[Path]:
    return sorted(Path(path).glob("*/*/*.safetensors"))
