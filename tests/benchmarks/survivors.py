"""Systems that save and load the same small model, behind one face, for `surviving`.

Each is used as its manual says. All methods are collective, but `newest_file` and
`die_in_next_save`.
"""

import os
import resource
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import xxhash

_MEGABYTES = 16  # of state in all


class Survivor(Protocol):
    """One system, in one rank."""

    def __init__(self, directory: str) -> None: ...

    def step(self) -> None:
        """Do one step of training."""

    def save(self, step: int) -> None:
        """Save, and return when it is on the disk."""

    def load(self) -> None:
        """Load the newest."""

    def digest(self) -> str:
        """Return a digest of every master and moment; it does not depend on the number of ranks."""

    def die_in_next_save(self) -> None:
        """Kill this rank when the next save has written about half of its file."""

    def close(self) -> None:
        """End in good order."""

    @staticmethod
    def newest_file(directory: Path) -> Path:
        """Return the largest file of the newest checkpoint."""


class _DeepSpeed:
    def __init__(self, directory: str) -> None:
        from tests.benchmarks import saving

        self._directory = directory
        self._ds_engine = saving.make_engine(_MEGABYTES, int(os.environ["WORLD_SIZE"]))

    def step(self) -> None:
        from tests.benchmarks import saving

        saving.step(self._ds_engine)

    def digest(self) -> str:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        def tensors() -> Iterator[Any]:
            for parameter in self._ds_engine.module.parameters():
                yield safe_get_full_fp32_param(parameter)
                for key in ("exp_avg", "exp_avg_sq"):
                    yield safe_get_full_optimizer_state(parameter, key)

        return _digest(tensors())

    def close(self) -> None:
        pass


class Everstep(_DeepSpeed):
    def __init__(self, directory: str) -> None:
        import engine

        super().__init__(directory)
        options = engine.CheckpointOptions(commit_deadline_seconds=10.0)
        self._checkpointer = engine.attach(self._ds_engine, directory, options)
        self._fresh = True

    def save(self, step: int) -> None:
        if self._fresh:
            self._checkpointer.resume("never")
            self._fresh = False
        assert self._checkpointer.save(step, sample_offset=step)
        assert self._checkpointer._saver.settle(60.0)

    def load(self) -> None:
        assert self._checkpointer.resume("auto") is not None
        self._checkpointer.close()

    def die_in_next_save(self) -> None:
        """The writer is stopped first, so that what it gets stays unwritten; then both die."""
        writer = self._checkpointer._saver._link.pid
        os.kill(writer, signal.SIGSTOP)
        assert self._checkpointer.save(2, sample_offset=2)
        for pid in (writer, os.getpid()):
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._checkpointer.close()

    @staticmethod
    def newest_file(directory: Path) -> Path:
        return _largest(Path(directory, "global_step2"))


class DeepSpeedDefault(_DeepSpeed):
    def save(self, step: int) -> None:
        self._ds_engine.save_checkpoint(self._directory, tag=f"global_step{step}")

    def load(self) -> None:
        path, _ = self._ds_engine.load_checkpoint(self._directory)
        if path is None:
            raise FileNotFoundError("load_checkpoint returned None")

    def die_in_next_save(self) -> None:
        _die_at(_largest(Path(self._directory, "global_step1")).stat().st_size // 2)

    @staticmethod
    def newest_file(directory: Path) -> Path:
        return _largest(Path(directory, (directory / "latest").read_text()))


class Distributed:
    """torch.distributed.checkpoint of an FSDP2 model; which directory is newest is the caller's
    affair, who asks for a `.metadata` in it, as torchtitan does."""

    def __init__(self, directory: str) -> None:
        import torch
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        self._directory = directory
        self._model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(2)))
        for layer in self._model:
            fully_shard(layer)
        fully_shard(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def step(self) -> None:
        import torch

        self._model(torch.ones(1, 1024)).pow(2).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=f"{self._directory}/step{step}")

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        whole = [path.parent for path in Path(self._directory).glob("step*/.metadata")]
        state = self._state()
        dcp.load(state, checkpoint_id=max(whole))
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def digest(self) -> str:
        def tensors() -> Iterator[Any]:
            for parameter in self._model.parameters():
                yield parameter.full_tensor()
                for key in ("exp_avg", "exp_avg_sq"):
                    yield self._optimizer.state[parameter][key].full_tensor()

        return _digest(tensors())

    def die_in_next_save(self) -> None:
        _die_at(_largest(Path(self._directory, "step1")).stat().st_size // 2)

    def close(self) -> None:
        pass

    @staticmethod
    def newest_file(directory: Path) -> Path:
        return _largest(Path(directory, "step2"))

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


WAYS: dict[str, type[Survivor]] = {
    "everstep": Everstep,
    "DeepSpeed default": DeepSpeedDefault,
    "torch DCP": Distributed,
}


def _digest(tensors: Iterable[Any]) -> str:
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _largest(directory: Path) -> Path:
    return max((path for path in directory.iterdir()), key=lambda path: path.stat().st_size)


def _die_at(size_bytes: int) -> None:
    """Kill this process at the first write that would make a file longer than that."""
    signal.signal(signal.SIGXFSZ, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))
