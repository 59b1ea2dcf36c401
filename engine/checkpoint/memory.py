"""How much memory this process could still take: of the host, and of its memory cgroups.

Taking pages past a cgroup's limit is no error that could be handled: the kernel kills. Linux only;
what cannot be read counts as no limit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Cgroup v1 has no word for "no limit": it shows the largest whole number of pages.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class Room:
    """Bytes that can be taken before a limit is met, and which limit that is."""

    free_bytes: int
    limit: str


def room(proc: Path = Path("/proc")) -> Room:
    """Return the least room under all limits that hold for this process."""
    return min([_of_host(proc), *_of_cgroups(proc)], key=lambda room: room.free_bytes)


def _of_host(proc: Path) -> Room:
    fields = _fields((proc / "meminfo").read_text().replace(":", " "))
    return Room(1024 * fields["MemAvailable"], "MemAvailable of the host")


def _of_cgroups(proc: Path) -> Iterator[Room]:
    """Look at this process's own memory cgroup and at those around it, of both versions."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for root, mount in _mounts(proc, controllers):
            within = path.removeprefix(root) if root != "/" else path
            lowest = mount / within.strip("/")
            for directory in (lowest, *lowest.parents):
                found = _of_cgroup(directory, version=2 if not controllers else 1)
                if found is not None:
                    yield found
                if directory == mount:
                    break


def _mounts(proc: Path, controllers: str) -> Iterator[tuple[str, Path]]:
    """Yield where the memory hierarchy is mounted, and which part of it that is."""
    if controllers and "memory" not in controllers.split(","):
        return
    for line in (proc / "self" / "mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        kind, _, options = kind.split(" ", 2)
        is_memory = kind == "cgroup" and "memory" in options.split(",")
        if is_memory if controllers else kind == "cgroup2":
            _, _, _, root, mount, *_ = place.split(" ")
            yield root, Path(mount)


def _of_cgroup(directory: Path, version: int) -> Room | None:
    limit, usage, reclaimable = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    try:
        limit_bytes = int((directory / limit).read_text())
        used_bytes = int((directory / usage).read_text())
        # File pages that nobody has used lately go at the first need.
        used_bytes -= _fields((directory / "memory.stat").read_text()).get(reclaimable, 0)
    except (OSError, ValueError):  # there is none of that name, or its limit is "max"
        return None
    if limit_bytes >= _NO_LIMIT_BYTES:
        return None
    said = f"memory cgroup {directory}, which has used {used_bytes} of its {limit_bytes} bytes"
    return Room(max(0, limit_bytes - used_bytes), said)


def _fields(text: str) -> dict[str, int]:
    """Read lines of a name and a number."""
    words = [line.split() for line in text.splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
