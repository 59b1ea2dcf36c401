"""Weights & Biases and Comet, through DeepSpeed's own monitors, as one run over all attempts.

DeepSpeed 0.19.8 begins a new one with every start. Here the run directory keeps the identity that
an attempt goes on with. Neither service takes a step back that it has been told of: Weights &
Biases keeps what it heard first of a step, Comet is told both.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster

from launcher.monitors import settings
from launcher.monitors.point import Point

_COMET_SAMPLES = "samples_log_interval"


class WeightsAndBiases:
    """A monitor; see `launcher.monitors.point`.

    Args:
        section: `deepspeed.wandb`.
        run: its name.
        environ: what of wandb's own variables is not set there, is set by `open`.
    """

    name = settings.WANDB

    def __init__(
        self,
        section: Mapping[str, Any],
        run: str,
        run_directory: Path,
        environ: MutableMapping[str, str],
    ) -> None:
        self.directory = run_directory / "wandb"
        self._section = dict(section)
        self._run = run
        self._environ = environ
        self._monitor: MonitorMaster | None = None

    def open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for variable, value in (
            ("WANDB_RUN_ID", _identity(self.directory)),
            ("WANDB_RESUME", "allow"),
            ("WANDB_NAME", self._run),
            ("WANDB_DIR", str(self.directory.parent)),
        ):
            self._environ.setdefault(variable, value)
        self._monitor = _monitor_of(self.name, self._section)

    def go_back(self, step: int) -> None:
        """Nothing: what it was told of a step stays."""

    def write(self, point: Point) -> None:
        import wandb

        if point.step >= wandb.run.step:  # it would warn about each of the others
            _write(self._monitor, point)

    def flush(self) -> None:
        """Nothing: its own process has it by then."""

    def close(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            import wandb

            wandb.finish()


class Comet:
    """A monitor; see `launcher.monitors.point`.

    Args:
        section: `deepspeed.comet`.
        run: its name.
        samples_per_step: to count `samples_log_interval` in steps.
    """

    name = settings.COMET

    def __init__(
        self, section: Mapping[str, Any], run: str, run_directory: Path, samples_per_step: int
    ) -> None:
        self.directory = run_directory / "comet"
        self._section = {"experiment_name": run, **section}
        if _COMET_SAMPLES in section:
            self._section[_COMET_SAMPLES] = max(1, section[_COMET_SAMPLES] // samples_per_step)
        else:
            self._section[_COMET_SAMPLES] = 1
        self._monitor: MonitorMaster | None = None

    def open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        identity = {"experiment_key": _identity(self.directory)}
        self._monitor = _monitor_of(self.name, {**identity, **self._section})

    def go_back(self, step: int) -> None:
        """Nothing: what it was told of a step stays."""

    def write(self, point: Point) -> None:
        _write(self._monitor, point)

    def flush(self) -> None:
        """Nothing: its own thread has it by then."""

    def close(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.comet_monitor.experiment.end()


def _identity(directory: Path) -> str:
    """Return what names the run to the service: made once, and kept with the run."""
    path = directory / "identity"
    try:
        with path.open("x", encoding="ascii") as file:
            file.write(uuid4().hex)
    except FileExistsError:
        pass
    return path.read_text(encoding="ascii")


def _monitor_of(name: str, section: Mapping[str, Any]) -> MonitorMaster:
    return MonitorMaster(get_monitor_config({name: dict(section)}))


def _write(monitor: MonitorMaster | None, point: Point) -> None:
    assert monitor is not None
    monitor.write_events([(name, value, point.step) for name, value in point.figures.items()])
