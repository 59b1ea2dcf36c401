"""The monitors of one start of a run, on rank 0: built once, and followed into by every attempt."""

import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from launcher.config import Settings
from launcher.errors import ConfigError
from launcher.monitors import settings as chosen
from launcher.monitors.follower import Follower
from launcher.monitors.point import Monitor
from launcher.monitors.thread import FollowerThread

_END_SECONDS = 10.0


class Monitors:
    """Shows what metrics.jsonl says, beside the training. Training thread of rank 0.

    The threads start when a step is done: the workers of the data have been forked by then. A fork
    in the middle of another thread's import would leave the child a lock that nobody lets go.

    Args:
        monitors: not open yet.
        metrics: metrics.jsonl.
        tokens_per_step: None where samples have no tokens.
    """

    def __init__(
        self, monitors: Sequence[Monitor], metrics: Path, tokens_per_step: int | None
    ) -> None:
        self._monitors = monitors
        self._metrics = metrics
        self._tokens_per_step = tokens_per_step
        self._threads: list[FollowerThread] = []

    def begin(self, attempt: int | None, step: int) -> None:
        """Follow an attempt, which goes on after `step`; it has recorded nothing yet."""
        self._threads = [
            FollowerThread(
                Follower(
                    monitor,
                    self._metrics,
                    tokens_per_step=self._tokens_per_step,
                    attempt=attempt,
                    step=step,
                )
            )
            for monitor in self._monitors
        ]

    def step_done(self) -> list[dict[str, Any]]:
        """Take note that a step is recorded; return the events since the last call."""
        for thread in self._threads:
            thread.start()
        return [event for thread in self._threads for event in thread.news()]

    def end(self) -> list[dict[str, Any]]:
        """Have all show what is recorded by now, and end; return the last events.

        Blocks for seconds, but not for a monitor that comes to no end.
        """
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.start()
            thread.ask_to_end()
        late = [
            {
                "event": "monitor_failed",
                "monitor": thread.name,
                "reason": f"it did not end in {_END_SECONDS:g} s, and is left behind",
            }
            for thread in self._threads
            if not thread.wait(deadline - time.monotonic())
        ]
        events = [event for thread in self._threads for event in thread.news()]
        self._threads = []
        return [*events, *late]


def monitors_of(settings: Settings, environ: MutableMapping[str, str]) -> Monitors:
    """Return the monitors that the settings ask for; imports what they need.

    Args:
        environ: of this process; what Weights & Biases reads is added to it.

    Raises:
        ConfigError: a package is there, but cannot be used.
    """
    monitors = []
    for name in chosen.enabled(settings.deepspeed):
        try:
            monitors.append(_monitor_of(name, settings, environ))
        except Exception as error:  # a broken installation can raise anything
            raise ConfigError(
                f"deepspeed.{name}.enabled=true: its package cannot be imported "
                f"({type(error).__name__}: {error}). Install it again, or leave the monitor out."
            ) from error
    tokens_per_step = settings.batch.global_size * settings.data.seq_len
    return Monitors(monitors, Path(settings.run.dir, "metrics.jsonl"), tokens_per_step)


def _monitor_of(name: str, settings: Settings, environ: MutableMapping[str, str]) -> Monitor:
    section: Mapping[str, Any] = settings.deepspeed[name]
    run, directory = settings.run.name, Path(settings.run.dir)
    if name == chosen.TENSORBOARD:
        from launcher.monitors.tensorboard import TensorBoard

        return TensorBoard(_place(section))
    if name == chosen.CSV:
        from launcher.monitors.csv_files import CsvFiles

        return CsvFiles(_place(section))
    if name == chosen.WANDB:
        from launcher.monitors.online import WeightsAndBiases

        return WeightsAndBiases(section, run, directory, environ)
    from launcher.monitors.online import Comet

    return Comet(section, run, directory, settings.batch.global_size)


def _place(section: Mapping[str, Any]) -> Path:
    return Path(section["output_path"], section["job_name"])
