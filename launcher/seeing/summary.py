"""Everything `status` and `report` say of one run, gathered once from its directory. Reads only."""

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import inspect
from engine.inspect import Listed
from engine.protocol.layout import CheckpointDirectory
from launcher.seeing import records
from launcher.seeing.goodput import Goodput, goodput
from launcher.seeing.life import ENDED, Life, life_of
from launcher.seeing.records import Record
from launcher.seeing.timeline import Attempt, attempts_of, kept_steps


@dataclass(frozen=True)
class Summary:
    """One run at one moment.

    name         of its directory
    total_steps  as far as its first configuration and later overrides say; None if neither does
    kept         the steps that its state descends from, by step
    checkpoints  the committed ones, the oldest first
    notes        what could not be read
    """

    name: str
    path: Path
    now: float
    total_steps: int | None
    life: Life
    attempts: Sequence[Attempt]
    kept: Sequence[Record]
    checkpoints: Sequence[Listed]
    goodput: Goodput
    notes: Sequence[str]

    @property
    def is_alive(self) -> bool:
        """Whether something of it seems to run still."""
        return self.life.state != ENDED

    @property
    def step(self) -> int:
        """The last step that it stands on."""
        committed = [one.manifest.step for one in self.checkpoints if one.manifest is not None]
        kept = [int(self.kept[-1]["step"])] if self.kept else []
        return max([*(kept if self.is_alive else committed), 0])

    @property
    def is_complete(self) -> bool:
        """Whether it has come to its last step, and that is committed."""
        return not self.is_alive and self.total_steps is not None and self.step >= self.total_steps

    def lives(self, attempt: Attempt) -> bool:
        """Whether an attempt is the one that seems to run still."""
        return self.is_alive and attempt is self.attempts[-1]

    def broke_off(self, attempt: Attempt) -> bool:
        """Whether an attempt was killed or has failed: it neither stopped as asked, nor lives."""
        return not self.lives(attempt) and attempt.exit_code not in (0, 75)


def summarize(path: Path, clock: float | None = None) -> Summary:
    """Look at the run at `path`. Raises nothing for what is damaged: that is in `notes`."""
    now = time.time() if clock is None else clock
    found = records.read(path)
    notes = list(found.notes)
    attempts = attempts_of(found)
    configuration = _configuration(path, notes)
    directory = _checkpoints_of(path, configuration)
    life = life_of(directory)
    return Summary(
        name=path.resolve().name,
        path=path,
        now=now,
        total_steps=_total_steps(configuration, attempts),
        life=life,
        attempts=attempts,
        kept=kept_steps(attempts),
        checkpoints=inspect.listing(inspect.Place(directory), strays=False),
        goodput=goodput(attempts, now if life.state != ENDED else None),
        notes=notes,
    )


def age_text(seconds: float) -> str:
    """Return a duration in its two largest units: `3 h 12 min`."""
    whole = datetime.timedelta(seconds=round(seconds))
    minutes, rest = divmod(whole.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(whole.days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    shown = [f"{number} {unit}" for number, unit in parts if number]
    return " ".join(shown[:2]) or "0 s"


def _configuration(path: Path, notes: list[str]) -> Mapping[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except OSError as error:
        notes.append(f"config.yaml: {error.strerror}")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError):
        notes.append("config.yaml is damaged")
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _checkpoints_of(path: Path, configuration: Mapping[str, Any]) -> CheckpointDirectory:
    """Where the configuration says; where a run's checkpoints usually are if it was moved."""
    own = path / "checkpoints"
    configured = _section(configuration, "checkpoint").get("dir")
    if own.is_dir() or not isinstance(configured, str):
        return CheckpointDirectory(str(own.absolute()))
    return CheckpointDirectory(configured)


def _total_steps(configuration: Mapping[str, Any], attempts: Sequence[Attempt]) -> int | None:
    steps = _section(configuration, "train").get("steps")
    for attempt in attempts:
        overrides = attempt.details.get("overrides")
        for override in overrides if isinstance(overrides, list) else []:
            name, _, value = str(override).partition("=")
            if name.lstrip("+") == "train.steps" and value.isdigit():
                steps = int(value)
    return steps if isinstance(steps, int) else None


def _section(configuration: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = configuration.get(name)
    return section if isinstance(section, dict) else {}
