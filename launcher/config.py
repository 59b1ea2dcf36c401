"""Typed settings: the door between Hydra's configuration and everything behind it.

`settings_from` is the only place that sees a DictConfig; past it there are frozen dataclasses.
YAML holds the values; the classes here and in the `*_settings` modules hold types, documentation
and checks. Nothing here reads the environment: paths become absolute against the directory of the
launch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.protocol.layout import CheckpointDirectory
from launcher import batch, deepspeed_section, schema
from launcher.checkpoint_settings import CheckpointSettings
from launcher.data_settings import DataSettings
from launcher.errors import ConfigError
from launcher.guards.settings import GuardSettings
from launcher.launch_settings import Launch
from launcher.monitors import settings as monitors
from launcher.reference import choices
from launcher.schema import at_least, require

_RESUME_WORDS = ("auto", "never", "must")
_PATHS = ("path", "init_from")  # in open sections, those of a component and of the model


@dataclass(frozen=True)
class RunSettings:
    """The `run` section."""

    name: str
    """Names the run; the same name continues the same run."""
    dir: str
    """Where the run lives; relative to where the command is given. It never holds a time: coming
    back must find the same directory."""

    def __post_init__(self) -> None:
        require(bool(self.name.strip()), "run.name is empty: give the run a name.")
        require(bool(self.dir.strip()), "run.dir is empty: give the run a directory.")


@dataclass(frozen=True)
class TrainSettings:
    """The `train` section."""

    steps: int
    """The run is complete after this many optimizer steps."""

    def __post_init__(self) -> None:
        at_least("train.steps", self.steps, 1)


@dataclass(frozen=True)
class BatchSettings:
    """The `batch` section."""

    global_size: int
    """Samples per step over all ranks; it does not change with the number of ranks."""
    micro_size: int
    """Samples per rank in one forward and backward pass."""

    def __post_init__(self) -> None:
        at_least("batch.global_size", self.global_size, 1)
        at_least("batch.micro_size", self.micro_size, 1)


@dataclass(frozen=True)
class OptimizerSettings:
    """The `optimizer` section."""

    type: str
    """A DeepSpeed optimizer, or the name of a class in torch.optim."""
    lr: float
    """Learning rate at its highest, which is reached when the warm-up ends."""
    weight_decay: float
    """What the optimizer takes by that name; AdamW's is decoupled from the gradient."""
    gradient_clipping: float
    """Largest global gradient norm; 0 turns clipping off."""
    betas: tuple[float, float] | None = None
    """Decay of the first and the second moment; null for optimizers that take none."""
    eps: float | None = None
    """Added to the root of the second moment; null for optimizers that take none."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Anything else that the optimizer takes: `+optimizer.params.amsgrad=true`."""

    def __post_init__(self) -> None:
        require(self.lr > 0, f"optimizer.lr={self.lr}: wanted a number above 0.")
        for name in ("weight_decay", "gradient_clipping"):
            at_least(f"optimizer.{name}", getattr(self, name), 0)


@dataclass(frozen=True)
class ScheduleSettings:
    """The `schedule` section."""

    warmup_steps: int
    """The learning rate rises linearly over this many steps; 0 starts at its full value."""
    decay: Literal["cosine", "none"]
    """What the learning rate does after the warm-up: `cosine` falls until the last step, `none`
    stays."""
    min_lr_ratio: float
    """Where cosine decay ends, as a fraction of optimizer.lr."""

    def __post_init__(self) -> None:
        at_least("schedule.warmup_steps", self.warmup_steps, 0)
        require(
            0 <= self.min_lr_ratio <= 1,
            f"schedule.min_lr_ratio={self.min_lr_ratio}: wanted a number from 0 to 1.",
        )


@dataclass(frozen=True)
class Settings:
    """Everything a run is made from. Equal on all ranks."""

    run: RunSettings
    """What the run is called, and where it is kept."""
    train: TrainSettings
    """How long it is."""
    batch: BatchSettings
    """How many samples a step takes. What a rank accumulates follows from it: global_size /
    (micro_size x ranks), which must be a whole number."""
    optimizer: OptimizerSettings
    """What moves the weights. It becomes DeepSpeed's `optimizer` section."""
    schedule: ScheduleSettings
    """The learning rate over the run's steps."""
    checkpoint: CheckpointSettings
    """When the run saves, where to, what is kept, and what is done when a save fails."""
    guard: GuardSettings
    """What is an alarm, and what follows one. `warn` goes on, `stop` ends the run without a save,
    `rollback` goes back to the last checkpoint before it and leaves out the samples."""
    data: DataSettings
    """What is trained on, in which shares and which order."""
    model: Mapping[str, Any]
    """What is trained: `model._target_`, and what it is called with. Any callable that returns a
    torch module will do, whose forward returns a loss, or has one."""
    launch: Launch
    """How ranks are started, and what they are held to."""
    deepspeed: Mapping[str, Any]
    """DeepSpeed's own configuration, as far as nothing else here decides it."""
    seed: int
    """Decides the initial weights, the order of the samples, and dropout."""
    resume: str
    """`auto` resumes if there is a checkpoint, `must` insists, `never` starts anew; or a tag."""

    def __post_init__(self) -> None:
        require(
            0 <= self.seed < 2**63, f"seed={self.seed}: wanted a whole number from 0 to 2^63 - 1."
        )
        require(isinstance(self.model.get("_target_"), str), "model._target_ is not set.")
        require(
            self.init_from is None or isinstance(self.init_from, str),
            f"model.init_from={self.init_from!r}: wanted a directory, or null.",
        )
        require(
            self.resume in _RESUME_WORDS or self.resume.startswith("global_step"),
            f"resume={self.resume!r}: wanted auto, never, must, or a tag such as global_step400.",
        )
        deepspeed_section.check(self.deepspeed)
        for phase, waits_for, would in (
            ("resume", "commit_deadline_seconds", "a slow save"),
            ("resume", "lease_seconds", "waiting for a run that has gone"),
            ("save", "commit_deadline_seconds", "a slow save"),
        ):
            minutes = getattr(self.launch, f"{phase}_timeout_minutes")
            seconds = getattr(self.checkpoint, waits_for)
            require(
                minutes * 60 > seconds,
                f"launch.{phase}_timeout_minutes={minutes:g} is not longer than "
                f"checkpoint.{waits_for}={seconds:g}: {would} would be taken for a hang. Raise the "
                "first, or lower the second.",
            )

    @property
    def init_from(self) -> str | None:
        """Where a fresh run takes its weights from: `model.init_from`."""
        directory: str | None = self.model.get("init_from")
        return directory

    @property
    def model_arguments(self) -> dict[str, Any]:
        """`model._target_` and what it is called with."""
        return {key: value for key, value in self.model.items() if key != "init_from"}

    def accumulation_steps(self, world_size: int) -> int:
        """Return the micro steps per step; raise ConfigError where the sizes do not fit."""
        return batch.accumulation_steps(
            global_size=self.batch.global_size,
            micro_size=self.batch.micro_size,
            world_size=world_size,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain containers, for JSON, YAML and comparison."""
        return asdict(self)


_SECTIONS = frozenset(field.name for field in fields(Settings))


def settings_from(config: DictConfig, launch_directory: Path) -> Settings:
    """Convert a composed configuration, and make its paths absolute.

    Raises:
        ConfigError: an unknown or missing setting, a value of the wrong type, or a combination
            that cannot work; the message names the setting and what would do.
    """
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{error.full_key or 'the configuration'}: {str(error).splitlines()[0]}"
        ) from error
    for group in plain:
        if group not in _SECTIONS and choices.of_group(group):
            raise ConfigError(
                f"{group}=...: the file that this chooses begins without `# @package _global_`, so "
                f"that its settings are those of a section {group!r}, which there is not."
            )
    settings = schema.build(Settings, plain, "")
    return replace(
        settings,
        run=replace(settings.run, dir=_absolute(settings.run.dir, launch_directory)),
        checkpoint=replace(
            settings.checkpoint, dir=_absolute(settings.checkpoint.dir, launch_directory)
        ),
        data=replace(
            settings.data,
            components={
                name: _with_absolute_paths(component, launch_directory)
                for name, component in settings.data.components.items()
            },
        ),
        model=_with_absolute_paths(settings.model, launch_directory),
        deepspeed=monitors.with_places(
            settings.deepspeed, settings.run.name, settings.run.dir, launch_directory
        ),
    )


def missing_data_files(settings: Settings) -> list[str]:
    """Return one line per component whose `path` is not there. Looks at the disk."""
    return [
        f"data.components.{name}.path={component['path']}: there is no such file."
        for name, component in settings.data.components.items()
        if "path" in component and not Path(component["path"]).exists()
    ]


def missing_model_files(settings: Settings) -> list[str]:
    """Return a line for each path of the model that is not there. Looks at the disk.

    Weights to begin with are of no use once there is a checkpoint, and may be gone then. Whether
    there is one is known later: a save may still have to be adopted, or lie on the nodes' disks.
    """
    begun = Path(CheckpointDirectory(settings.checkpoint.dir).attempts).exists()
    wanted = ("path",) if begun else _PATHS
    return [
        f"model.{key}={settings.model[key]}: there is no such file or directory."
        for key in wanted
        if isinstance(settings.model.get(key), str) and not Path(settings.model[key]).exists()
    ]


def _with_absolute_paths(section: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    paths = {key: section[key] for key in _PATHS if isinstance(section.get(key), str)}
    return {**section, **{key: _absolute(path, directory) for key, path in paths.items()}}


def _absolute(path: str, directory: Path) -> str:
    return str(directory / Path(path).expanduser())
