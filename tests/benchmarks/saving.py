"""What a save costs: ours, next to this machine's limits and to the ways of others.

    python -m tests.benchmarks.saving [--megabytes 400] [--rounds 3] [--json FILE]

Two gloo ranks with ZeRO-3 state of the given size each, everything in turn in one run: machines are
noisy, so only the ratios of one table mean anything. Figures are the slowest rank's. Every way is
followed by steps of training until it is done, which are compared with quiet steps of the same
round.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks import command, committing, report
from tests.distributed.ranks import run_ranks

RANKS = 2
WIDTH = 2048
_BYTES_PER_PARAMETER = 12  # fp32 master and two moments
_QUIET_STEPS = 5
_LEAST_STEPS = 2  # after a save: where one step waits for it, the next one shows what is usual
_EVERY_STEP = 4
_TIMEOUT_SECONDS = 3600.0

Seconds = dict[str, list[float]]


class Bench:
    """One rank of the benchmark: it trains, saves, and notes times."""

    def __init__(self, directory: str, megabytes: int) -> None:
        import torch

        import engine
        from tests.benchmarks import peers

        self.results: dict[str, Seconds] = {}
        self._torch = torch
        self._directory = directory
        self._ds_engine = _make_engine(megabytes)
        decoupled = self._ds_engine.checkpoint_engine
        events: list[dict[str, Any]] = []
        self._checkpointer = engine.attach(
            self._ds_engine, f"{directory}/ours", on_event=events.append
        )
        self._checkpointer.resume("never")
        self._step()
        state = peers.zero3_state(self._ds_engine)
        self.ways: list[peers.Way] = [
            peers.Ours(self._checkpointer, events),
            peers.DeepSpeedDefault(self._ds_engine, directory),
            peers.DeepSpeedDecoupled(self._ds_engine, decoupled, directory),
            peers.DistributedThread(state, directory),
            peers.DistributedProcess(state, directory),
        ]
        self._decoupled = decoupled

    @property
    def bytes_per_rank(self) -> int:
        return int(self._checkpointer._saver._area.size_bytes)

    def warm_up(self) -> None:
        """Let everyone start processes, take pages and plan, before anything is timed."""
        for way in self.ways:
            way.save()
            self._step()
            way.finish()

    def round(self) -> None:
        """Time each thing once."""
        self._note("machine", "warm copy", self._timed(self._copy))
        self._note("machine", "raw write", self._timed(self._write))
        for way in self.ways:
            self._rest()
            quiet = self._quiet_steps()
            pause, committed, steps, meanwhile = self._one_save(way)
            self._rest()
            # From both sides of the save: machines get slower and faster by the minute.
            quiet += self._quiet_steps()
            every_step = self._save_every_step(way)
            self._note_all(way.name, quiet, pause, committed, steps, meanwhile, every_step)

    def close(self) -> None:
        self._checkpointer.close()
        self._decoupled.cleanup()

    def _quiet_steps(self) -> list[float]:
        return [self._timed(self._step) for _ in range(_QUIET_STEPS)]

    def _one_save(self, way: Any) -> tuple[float, float, list[float], list[float]]:
        """Save once; return the pause, when it was durable, and the steps: all, and those until."""
        started = time.perf_counter()
        pause = self._timed(way.save)
        steps: list[float] = []
        meanwhile: list[float] = []
        committed = None
        while committed is None or len(steps) < _LEAST_STEPS:
            if committed is None and self._all(way.is_done()):
                committed = self._slowest(way.finish() - started)
                continue
            steps.append(self._timed(self._step))
            if committed is None:
                meanwhile.append(steps[-1])
        return pause, committed, steps, meanwhile

    def _save_every_step(self, way: Any) -> float:
        """Return the seconds of a step with a save."""

        def steps() -> None:
            for _ in range(_EVERY_STEP):
                way.save()
                self._step()

        seconds = self._timed(steps)
        way.finish()
        return seconds / _EVERY_STEP

    def _note_all(
        self,
        name: str,
        quiet_steps: list[float],
        pause: float,
        committed: float,
        steps: list[float],
        meanwhile: list[float],
        every_step: float,
    ) -> None:
        quiet = statistics.median(quiet_steps)
        extra = sum(steps) - quiet * len(steps)
        slow_down = statistics.median(meanwhile) / quiet if meanwhile else 1.0
        for what, value in (
            ("quiet step", quiet),
            ("pause", pause),
            ("extra of the next steps", extra),
            ("cost of a save", pause + extra),
            ("committed after", committed),
            ("step meanwhile / quiet", slow_down),
            ("overhead at one per step", every_step / quiet - 1),
            ("overhead at one per ten steps", (pause + extra) / (10 * quiet)),
        ):
            self._note(name, what, value)

    # --- parts

    def _step(self) -> None:
        step(self._ds_engine)

    def _timed(self, action: Callable[[], Any]) -> float:
        """Seconds of the slowest rank."""
        self._torch.distributed.barrier()
        started = time.perf_counter()
        action()
        return self._slowest(time.perf_counter() - started)

    def _slowest(self, seconds: float) -> float:
        number = self._torch.tensor([seconds], dtype=self._torch.float64)
        self._torch.distributed.all_reduce(number, op=self._torch.distributed.ReduceOp.MAX)
        return float(number.item())

    def _all(self, done: bool) -> bool:
        return self._slowest(0.0 if done else 1.0) == 0.0

    def _rest(self) -> None:
        """Nothing that one has left to write may slow the next."""
        os.sync()
        self._torch.distributed.barrier()

    def _copy(self) -> None:
        """Copy one image onto the other: the same bytes, memory to memory, both warm."""
        first, second = self._checkpointer._saver._area._images
        second.bytes.copy_(first.bytes)

    def _write(self) -> None:
        """Write an image without digest, receipt or commit."""
        path = f"{self._directory}/raw{os.getpid()}"
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        view = memoryview(self._checkpointer._saver._area._images[0]._mapping)
        for begin in range(0, len(view), 16 << 20):
            os.write(descriptor, view[begin : begin + (16 << 20)])
        os.fsync(descriptor)
        os.close(descriptor)
        os.unlink(path)

    def _note(self, who: str, what: str, seconds: float) -> None:
        self.results.setdefault(who, {}).setdefault(what, []).append(seconds)


def measure(directory: str, megabytes: int, rounds: int) -> dict[str, Any]:
    """Run on every rank; return the figures by way and by what they are."""
    bench = Bench(directory, megabytes)
    bench.warm_up()
    for _ in range(rounds):
        bench.round()
    setup = {way.name: way.setup for way in bench.ways}
    size = bench.bytes_per_rank
    bench.close()
    return {"bytes_per_rank": size, "setup": setup, "figures": bench.results}


def _make_engine(megabytes: int) -> Any:
    """Return a ZeRO-3 engine with about that much state per rank, and DeepSpeed's decoupled saver.

    A tiny batch: the step is short, and most of it goes over the state, as the saves do.
    """
    from tests.benchmarks.peers import writer_type

    os.environ.update(CROSS_RANK="0", CROSS_SIZE="1")  # as DeepSpeed's own launcher sets them
    checkpoint = {"writer": {"type": writer_type(), "decoupled": True}}
    return make_engine(megabytes * RANKS, RANKS, checkpoint=checkpoint)


def make_engine(megabytes: int, world_size: int, **settings: Any) -> Any:
    """Return a ZeRO-3 engine with about that much state in all, over all ranks of this world."""
    import deepspeed
    import torch

    layers = max(1, round(megabytes * 1e6 / (_BYTES_PER_PARAMETER * WIDTH * WIDTH)))
    config = {
        "train_batch_size": world_size,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}},
        **settings,
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        )
    ds_engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return ds_engine


def step(ds_engine: Any) -> None:
    """Do one step on a tiny batch."""
    import torch

    loss = ds_engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().pow(2).mean()
    ds_engine.backward(loss)
    ds_engine.step()


def main() -> None:
    """Measure, print a table and where it falls short, and write JSON if asked."""
    parser = command.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=400, help="state per rank")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    load = [os.getloadavg()[0]]
    with command.scratch() as directory:
        results, *_ = run_ranks(
            "tests.benchmarks.saving:measure",
            RANKS,
            timeout_seconds=_TIMEOUT_SECONDS,
            directory=directory,
            megabytes=options.megabytes,
            rounds=options.rounds,
        )
        load.append(os.getloadavg()[0])
        results["commit"] = committing.measure(directory)
    results.update(ranks=RANKS, rounds=options.rounds, load=load, cpus=os.cpu_count())
    print(report.text(results))
    command.keep(results, options.json)


if __name__ == "__main__":
    main()
