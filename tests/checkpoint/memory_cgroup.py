"""A memory cgroup of one's own, of whichever version this machine has, below the test's own one."""

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint import memory


@dataclass(frozen=True)
class MemoryCgroup:
    """A directory of the kernel's, with a limit."""

    path: Path

    def take_in(self, pid: int) -> None:
        """Move a process in: what it takes from now on is charged here."""
        (self.path / "cgroup.procs").write_text(str(pid))


def _parents() -> Iterator[tuple[Path, str]]:
    """Yield where a memory cgroup could be made, and what its limit is called there."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for root, mount in memory._mounts(Path("/proc"), controllers):
            own = mount / (path.removeprefix(root) if root != "/" else path).strip("/")
            yield own, "memory.limit_in_bytes" if controllers else "memory.max"


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup | None]:
    """Make one; yield None where this machine does not let this process."""
    made = None
    for parent, limit in _parents():
        path = parent / f"everstep-test-{secrets.token_hex(4)}"
        try:
            path.mkdir()
            (path / limit).write_text(str(limit_bytes))
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            continue
        made = path
        break
    try:
        yield None if made is None else MemoryCgroup(made)
    finally:
        if made is not None:
            made.rmdir()
