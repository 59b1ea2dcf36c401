"""Typed settings: the door between Hydra's configuration and everything behind it.

`settings_from` is the only place that sees a DictConfig; past it there are frozen dataclasses.
YAML holds the values, the classes below hold types, documentation and checks. Nothing here reads
the environment or the disk: paths become absolute against the directory of the launch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.protocol.layout import CheckpointDirectory
from launcher import batch, deepspeed_section, schema
from launcher.errors import ConfigError
from launcher.guards.settings import GuardSettings
from launcher.launch_settings import Launch
from launcher.schema import at_least

_RESUME_WORDS = ("auto", "never", "must")
_PATHS = ("path", "init_from")  # in open sections, those of a component and of the model

_LEAST_LEASE_SECONDS = 45

METRICS = ("loss",)
"""What the step loop tells of each save, for `checkpoint.keep_best`."""


@dataclass(frozen=True)
class RunSettings:
    name: str
    """Names the run; the same name continues the same run."""
    dir: str
    """Where the run lives. It never holds a time: coming back must find the same directory."""

    def __post_init__(self) -> None:
        _require(bool(self.name.strip()), "run.name is empty: give the run a name.")
        _require(bool(self.dir.strip()), "run.dir is empty: give the run a directory.")


@dataclass(frozen=True)
class TrainSettings:
    steps: int
    """The run is complete after this many optimizer steps."""

    def __post_init__(self) -> None:
        at_least("train.steps", self.steps, 1)


@dataclass(frozen=True)
class BatchSettings:
    global_size: int
    """Samples per step over all ranks; it does not change with the number of ranks."""
    micro_size: int
    """Samples per rank in one forward and backward pass."""

    def __post_init__(self) -> None:
        at_least("batch.global_size", self.global_size, 1)
        at_least("batch.micro_size", self.micro_size, 1)


@dataclass(frozen=True)
class OptimizerSettings:
    type: str
    """A DeepSpeed optimizer, or the name of a class in torch.optim."""
    lr: float
    weight_decay: float
    gradient_clipping: float
    """Largest global gradient norm; 0 turns clipping off."""
    betas: tuple[float, float] | None = None
    """null for optimizers that take none."""
    eps: float | None = None
    """null for optimizers that take none."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Anything else that the optimizer takes."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, f"optimizer.lr={self.lr}: wanted a number above 0.")
        for name in ("weight_decay", "gradient_clipping"):
            at_least(f"optimizer.{name}", getattr(self, name), 0)


@dataclass(frozen=True)
class ScheduleSettings:
    warmup_steps: int
    """The learning rate rises linearly over this many steps; 0 starts at its full value."""
    decay: str
    """`cosine` over the steps after warm-up, or `none`."""
    min_lr_ratio: float
    """Where cosine decay ends, as a fraction of optimizer.lr."""

    def __post_init__(self) -> None:
        at_least("schedule.warmup_steps", self.warmup_steps, 0)
        _require(
            self.decay in ("cosine", "none"),
            f"schedule.decay={self.decay!r}: wanted cosine or none.",
        )
        _require(
            0 <= self.min_lr_ratio <= 1,
            f"schedule.min_lr_ratio={self.min_lr_ratio}: wanted a number from 0 to 1.",
        )


@dataclass(frozen=True)
class KeepBestSettings:
    metric: str
    """`loss`: the mean over the global batch of the step that the save follows."""
    mode: str
    """`min` keeps the smallest, `max` the largest."""
    count: int

    def __post_init__(self) -> None:
        _require(
            self.metric in METRICS,
            f"checkpoint.keep_best.metric={self.metric!r}: wanted one of {', '.join(METRICS)}.",
        )
        _require(
            self.mode in ("min", "max"),
            f"checkpoint.keep_best.mode={self.mode!r}: wanted min or max.",
        )
        at_least("checkpoint.keep_best.count", self.count, 1)


@dataclass(frozen=True)
class AutoSettings:
    mtbf_hours: float | None
    """Mean time between failures of the whole run; null estimates it from its attempts."""

    def __post_init__(self) -> None:
        _require(
            self.mtbf_hours is None or self.mtbf_hours > 0,
            f"checkpoint.auto.mtbf_hours={self.mtbf_hours}: wanted a number above 0, or null.",
        )


@dataclass(frozen=True)
class CheckpointSettings:
    dir: str
    local_dir: str | None
    """A directory on each node's own fast disk, where a save is written and committed first; from
    there it goes on to `dir`. Absolute, and to be found again after a requeue. Null goes straight
    to `dir`."""
    every_steps: int | None
    every_minutes: float | None
    """Counted from the last save of any cause."""
    auto: AutoSettings | None
    """Plans the time between saves from what they cost and how often the run fails; null for not.
    `checkpoint=auto` sets it."""
    keep_last: int
    """So many of the newest checkpoints stay."""
    keep_every_steps: int | None
    """Those whose step is a multiple of it stay for ever; null for none."""
    keep_best: KeepBestSettings | None
    """The best by a metric stay, until better ones come; null for none."""
    max_bytes_per_second: float | None
    """Cap of what each rank writes to `dir`; null leaves it free."""
    commit_deadline_seconds: float
    """A save whose shards are not all durable by then is abandoned."""
    lease_seconds: float
    """A run on another host is taken for dead when it has given no sign of life for so long. It
    gives one every 5 seconds, and says so when none of them has got through for this long."""
    writer_silence_seconds: float
    """A writer process that says nothing for so long is killed and replaced. It speaks whatever
    the disk does, so only one that was stopped, or starved of its processor, is silent."""
    max_failures: int
    """The run stops after this many failed saves in a row."""
    when_busy: str
    """Both images still being written when a save is due: `wait` for one, or `skip` this save."""
    exclude_frozen: bool
    """Do not store frozen parameters: for adapters on a large base, which every start loads."""
    verify_on_resume: str
    """`full` digests every shard of the checkpoint that is resumed from; `size` only looks at sizes
    and headers, and trains on with whatever a bad disk has made of the data."""
    paranoid: bool
    """Read every checkpoint back, and compare it with the state that was live at its step."""

    def __post_init__(self) -> None:
        _require(
            self.local_dir is None or Path(self.local_dir).is_absolute(),
            f"checkpoint.local_dir={self.local_dir!r}: wanted an absolute path, the same on every "
            "node, or null.",
        )
        _require(
            any(one is not None for one in (self.every_steps, self.every_minutes, self.auto)),
            "checkpoint.every_steps and checkpoint.every_minutes are both null: set at least one, "
            "or checkpoint=auto.",
        )
        if self.every_steps is not None:
            at_least("checkpoint.every_steps", self.every_steps, 1)
        if self.keep_every_steps is not None:
            at_least("checkpoint.keep_every_steps", self.keep_every_steps, 1)
        for name in (
            "every_minutes",
            "max_bytes_per_second",
            "commit_deadline_seconds",
            "writer_silence_seconds",
        ):
            value = getattr(self, name)
            _require(
                value is None or value > 0, f"checkpoint.{name}={value}: wanted a number above 0."
            )
        # Nine beats: a shorter one would take a living run's place.
        at_least("checkpoint.lease_seconds", self.lease_seconds, _LEAST_LEASE_SECONDS)
        at_least("checkpoint.keep_last", self.keep_last, 1)
        at_least("checkpoint.max_failures", self.max_failures, 1)
        _require(
            self.when_busy in ("wait", "skip"),
            f"checkpoint.when_busy={self.when_busy!r}: wanted wait or skip.",
        )
        _require(
            self.verify_on_resume in ("full", "size"),
            f"checkpoint.verify_on_resume={self.verify_on_resume!r}: wanted full or size.",
        )


@dataclass(frozen=True)
class StageSettings:
    from_sample: int
    """The first global index that is drawn with these weights."""
    weights: Mapping[str, float]
    """By component; one that is not named keeps its weight."""

    def __post_init__(self) -> None:
        at_least("data.stages: from_sample", self.from_sample, 0)
        for name, weight in self.weights.items():
            at_least(f"data.stages: the weight of {name}", weight, 0)


@dataclass(frozen=True)
class DataSettings:
    components: Mapping[str, Mapping[str, Any]]
    """By name: `_target_` (a map-style data set), `weight`, `epochs` (how often its samples may be
    drawn; null or left out for no limit), and the data set's arguments."""
    seq_len: int
    workers: int
    """Loader processes per rank; 0 loads in the training process."""
    prefetch_batches: int
    """Batches that each worker keeps ready."""
    accept_changed: bool
    """Resume although the data differ from those the checkpoint was made with."""
    stages: tuple[StageSettings, ...] = ()
    """Other weights from given samples on. May be added to ahead of where the run stands."""
    skip: tuple[tuple[int, int], ...] = ()
    """Ranges [first, end] of global indices that are left out, the end not included."""
    when_exhausted: str = "redistribute"
    """What happens when a component has had its epochs: `redistribute` gives its share to the
    others, `end` ends the run."""

    def __post_init__(self) -> None:
        _require(
            self.when_exhausted in ("redistribute", "end"),
            f"data.when_exhausted={self.when_exhausted!r}: wanted redistribute or end.",
        )
        at_least("data.seq_len", self.seq_len, 1)
        at_least("data.workers", self.workers, 0)
        at_least("data.prefetch_batches", self.prefetch_batches, 1)
        _require(bool(self.components), "data.components is empty: name at least one data set.")
        for name, component in self.components.items():
            _check_component(f"data.components.{name}", component)


@dataclass(frozen=True)
class Settings:
    """Everything a run is made from. Equal on all ranks."""

    run: RunSettings
    train: TrainSettings
    batch: BatchSettings
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    checkpoint: CheckpointSettings
    guard: GuardSettings
    data: DataSettings
    model: Mapping[str, Any]
    launch: Launch
    deepspeed: Mapping[str, Any]
    seed: int
    resume: str
    """`auto` resumes if there is a checkpoint, `must` insists, `never` starts anew; or a tag."""

    def __post_init__(self) -> None:
        _require(
            0 <= self.seed < 2**63, f"seed={self.seed}: wanted a whole number from 0 to 2^63 - 1."
        )
        _require(isinstance(self.model.get("_target_"), str), "model._target_ is not set.")
        _require(
            self.init_from is None or isinstance(self.init_from, str),
            f"model.init_from={self.init_from!r}: wanted a directory, or null.",
        )
        _require(
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
            _require(
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


def settings_from(config: DictConfig, launch_directory: Path) -> Settings:
    """Convert a composed configuration, and make its paths absolute.

    Raises:
        ConfigError: an unknown or missing setting, a value of the wrong type, or a combination
            that cannot work; the message names the setting and what would do.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{error.full_key or 'the configuration'}: {str(error).splitlines()[0]}"
        ) from error
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


def _check_component(path: str, component: Mapping[str, Any]) -> None:
    if not isinstance(component.get("_target_"), str):
        raise ConfigError(f"{path}._target_ is not set: name the class of the data set.")
    for key, value in component.items():
        if value == "???":
            raise ConfigError(f"{path}.{key} is not set: give it, {path}.{key}=...")
    weight = component.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight < 0:
        raise ConfigError(f"{path}.weight={weight!r}: wanted a number, 0 or above.")
    epochs = component.get("epochs")
    if epochs is not None and (type(epochs) is not int or epochs < 1):
        raise ConfigError(
            f"{path}.epochs={epochs!r}: wanted a whole number of 1 or more, or null for no limit."
        )
    if not isinstance(component.get("path", ""), str):
        raise ConfigError(f"{path}.path={component['path']!r}: wanted text.")


def _with_absolute_paths(section: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    paths = {key: section[key] for key in _PATHS if isinstance(section.get(key), str)}
    return {**section, **{key: _absolute(path, directory) for key, path in paths.items()}}


def _absolute(path: str, directory: Path) -> str:
    return str(directory / Path(path).expanduser())


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
