"""Training loops of one's own, as documented: started for real, killed, and started again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import daemons, tiny_run
from tests.distributed.ranks import free_port
from tests.run_processes import MARK

STEPS = 20
LOSSES = "losses_0.jsonl"
LOOPS = {
    "plain DeepSpeed": tiny_run.REPOSITORY / "examples" / "plain_deepspeed.py",
    "Hugging Face Trainer": tiny_run.REPOSITORY / "tests" / "holds" / "hf_trainer.py",
}

# The first init_distributed on a machine compiles an operation of DeepSpeed's.
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_killed_loop_ends_with_the_bits_of_an_undisturbed_one(loop: str, tmp_path: Path) -> None:
    script = LOOPS[loop]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    with _start(script, undisturbed) as process:
        assert process.wait() == 0
    killed.mkdir()
    os.mkfifo(killed / LOSSES)
    with _start(script, killed) as process:
        written = _hold_at_step(8, killed / LOSSES)
        ranks = _ranks(script, killed)
        assert len(ranks) == 2
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        assert process.wait() != 0
    (killed / LOSSES).unlink()
    (killed / LOSSES).write_text(written)
    with _start(script, killed) as process:
        assert process.wait() == 0
    wanted, found = _losses(undisturbed), _losses(killed)
    assert [step for step, _ in wanted] == list(range(1, STEPS + 1))
    reached = written.count("\n")
    first = found[reached][0]
    assert 1 < first <= reached + 1, "it was resumed"
    assert [step for step, _ in found[reached:]] == list(range(first, STEPS + 1))
    assert {*found} == {*wanted}, "those of steps that were done again, too"
    shards = sorted((undisturbed / "checkpoints" / f"global_step{STEPS}").glob("*.safetensors"))
    assert len(shards) == 2
    for shard in shards:
        other = killed / "checkpoints" / shard.parent.name / shard.name
        assert _data_of(other) == _data_of(shard)


def _start(script: Path, directory: Path) -> subprocess.Popen[bytes]:
    """Each rank has a keeper, as where a scheduler starts them."""
    directory.mkdir(exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
    return subprocess.Popen(
        [
            *(*torchrun, "--nproc-per-node=2", f"--master-port={free_port()}"),
            *(sys.executable, "-m", "launcher.keep", "--"),
            *(sys.executable, script, f"--directory={directory}", f"--steps={STEPS}"),
        ],
        env=os.environ | tiny_run.environment() | {MARK: str(directory)},
        stdin=subprocess.DEVNULL,
    )


def _ranks(script: Path, directory: Path) -> list[int]:
    """Pids of the ranks: they run the script itself, not its starter or their keepers."""
    found = []
    for pid in daemons.marked(MARK, directory):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if words[1:2] == [str(script)]:
            found.append(pid)
    return found


def _hold_at_step(wanted: int, pipe: Path) -> str:
    """Return what rank 0 has written up to a step. After it the rank waits for a reader again."""
    written = ""
    while f'"step": {wanted},' not in written:
        written += pipe.read_text()  # one step's, as a rule: rank 0 opens the file for each
    return written


def _losses(directory: Path) -> list[tuple[int, str]]:
    """Step and losses of every line that rank 0 has written."""
    read = [json.loads(line) for line in (directory / LOSSES).read_text().splitlines()]
    return [(line["step"], repr(line["losses"])) for line in read]


def _data_of(shard: Path) -> bytes:
    """All but the header, which names the save."""
    data = shard.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]
