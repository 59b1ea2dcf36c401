"""How much memory is left, read from kernel files of every kind that a host may show."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.checkpoint import memory
from engine.checkpoint.memory import Room, room
from tests.checkpoint.memory_cgroup import memory_cgroup

_REPOSITORY = Path(__file__).parents[2]

_V2_MOUNT = "30 23 0:26 {root} {mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
_V1_MOUNT = "35 31 0:32 {root} {mount} rw,relatime - cgroup cgroup rw,memory\n"
_OTHER_MOUNTS = (
    "23 1 254:0 / / rw - ext4 /dev/root rw\n32 31 0:29 / /nowhere rw - cgroup cgroup rw,cpu\n"
)


def _proc(tmp_path: Path, cgroup: str, mounts: str, available_kib: int = 1000) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    lines = f"MemTotal:  9999 kB\nMemAvailable:  {available_kib} kB\nHugePages_Total:  0\n"
    (proc / "meminfo").write_text(lines)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text(_OTHER_MOUNTS + mounts)
    return proc


def _v2(directory: Path, limit: str, used: int, inactive: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")


def _v1(directory: Path, limit: int, used: int, inactive: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive}\n")


def test_without_cgroups_the_host_decides(tmp_path: Path) -> None:
    proc = _proc(tmp_path, "", "")
    assert room(proc) == Room(1000 * 1024, "MemAvailable of the host")


@pytest.mark.parametrize("tightest", ["job", "job/step", "job/step/task"])
def test_the_tightest_limit_on_the_way_up_decides(tmp_path: Path, tightest: str) -> None:
    mount = tmp_path / "cgroup"
    for name in ("job", "job/step", "job/step/task"):
        _v2(mount / name, "10000" if name == tightest else "max", used=4000, inactive=1500)
    proc = _proc(tmp_path, "0::/job/step/task\n", _V2_MOUNT.format(root="/", mount=mount))
    found = room(proc)
    assert found.free_bytes == 10_000 - 4000 + 1500
    assert str(mount / tightest) in found.limit
    assert "used 2500 of its 10000 bytes" in found.limit


def test_the_host_decides_where_the_cgroup_has_more(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    _v2(mount / "job", "99999999", used=0)
    proc = _proc(tmp_path, "0::/job\n", _V2_MOUNT.format(root="/", mount=mount))
    assert room(proc).limit == "MemAvailable of the host"


def test_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    mount, unified = tmp_path / "memory", tmp_path / "unified"
    _v1(mount, 9223372036854771712, used=77)
    _v1(mount / "slurm" / "job_7", 5000, used=4000, inactive=300)
    unified.mkdir()
    proc = _proc(
        tmp_path,
        "5:cpu:/\n4:memory:/slurm/job_7\n0::/\n",
        _V1_MOUNT.format(root="/", mount=mount) + _V2_MOUNT.format(root="/", mount=unified),
    )
    found = room(proc)
    assert found.free_bytes == 5000 - 4000 + 300
    assert str(mount / "slurm" / "job_7") in found.limit


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner", "/"])
def test_a_container_sees_its_own_part_of_the_hierarchy(tmp_path: Path, path: str) -> None:
    """The mount's root is the container's cgroup, so paths begin with that, or at it."""
    mount = tmp_path / "cgroup"
    _v2(mount, "8000", used=6000)
    root = "/" if path == "/" else "/docker/abc"
    proc = _proc(tmp_path, f"0::{path}\n", _V2_MOUNT.format(root=root, mount=mount))
    assert room(proc).free_bytes == 2000


def test_more_used_than_allowed_is_no_room(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    _v2(mount / "job", "1000", used=4000)
    proc = _proc(tmp_path, "0::/job\n", _V2_MOUNT.format(root="/", mount=mount))
    assert room(proc).free_bytes == 0


_CHARGED = """
import os, sys
from pathlib import Path
from engine.checkpoint.memory import room
from tests.checkpoint.memory_cgroup import MemoryCgroup
MemoryCgroup(Path(sys.argv[1])).take_in(os.getpid())
before = room()
image = os.memfd_create("image")
os.write(image, bytes(int(sys.argv[2])))
during = room()
os.close(image)
print(before.limit, before.free_bytes, during.free_bytes, room().free_bytes, sep="|")
"""


def test_a_real_cgroup_shows_its_limit_and_an_image_is_charged_to_it() -> None:
    image_bytes, limit_bytes = 32 << 20, 128 << 20
    with memory_cgroup(limit_bytes) as cgroup:
        if cgroup is None:
            pytest.skip("this machine lets nobody make a memory cgroup")
        command = [sys.executable, "-c", _CHARGED, str(cgroup.path), str(image_bytes)]
        done = subprocess.run(command, cwd=_REPOSITORY, check=True, capture_output=True, text=True)
    limit, *numbers = done.stdout.strip().split("|")
    before, during, after = map(int, numbers)
    assert f"memory cgroup {cgroup.path}" in limit
    assert f"of its {limit_bytes} bytes" in limit
    assert before <= limit_bytes
    assert before - during >= 0.9 * image_bytes, "the kernel counts in batches"
    assert after - during >= image_bytes / 2, "given back with the image"


def test_the_files_of_this_machine_can_be_read() -> None:
    assert 0 <= room().free_bytes <= memory._of_host(Path("/proc")).free_bytes + (1 << 30)
