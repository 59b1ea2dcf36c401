"""`deepspeed --hostfile` over two real ssh hosts."""

from __future__ import annotations

import json
from pathlib import Path

from tests import tiny_run
from tests.distributed.ssh_hosts import HOSTS, SshHosts

TELL = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CROSS_RANK", "LOCAL_SIZE", "MASTER_ADDR")
told = {name: os.environ[name] for name in names}
told |= {"host": os.environ["EVERSTEP_TEST_HOST"], "arguments": sys.argv[1:]}
with open(f"told.{told['RANK']}", "w") as file:
    json.dump(told, file)
"""


def test_what_deepspeed_tells_a_rank(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    """The facts that the launcher relies on: one rank per host, and which arguments arrive how."""
    (tmp_path / "tell.py").write_text(TELL)
    done = ssh_hosts.deepspeed("--module", "tell", "a.b=1", "c=x y", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    for rank, host in enumerate(HOSTS):
        told = json.loads((tmp_path / f"told.{rank}").read_text())
        assert told == {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "CROSS_RANK": str(rank),
            "LOCAL_SIZE": "1",
            "MASTER_ADDR": HOSTS[0],
            "host": host,
            "arguments": ["--local_rank=0", "a.b=1", "c=x y"],
        }


def test_failure_of_one_host_is_the_exit_code(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("import os, sys; sys.exit(3 * int(os.environ['RANK']))")
    done = ssh_hosts.deepspeed("--module", "fail", cwd=tmp_path)
    assert done.returncode != 0, done.stdout


def test_training_gives_the_bits_of_a_local_run(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = ssh_hosts.deepspeed(
        *("--module", "launcher", *tiny_run.arguments(run)),
        cwd=tmp_path,
        environment=tiny_run.environment(),
        seconds=180,
    )
    assert done.returncode == 0, done.stdout
    assert tiny_run.losses(run) == tiny_run.reference_losses()
