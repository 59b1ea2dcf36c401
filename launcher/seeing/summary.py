"""Everything `status` and `report` say of one run, gathered once from its directory. Reads only."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import describe, inspect
from engine.inspect import Listed
from engine.protocol.layout import CheckpointDirectory
from launcher.seeing import lines, records
from launcher.seeing.columns import Step
from launcher.seeing.goodput import Goodput, goodput
from launcher.seeing.life import ENDED, FINISHING, RUNNING, Life, life_of
from launcher.seeing.timeline import Attempt, attempts_of, living, newest_kept

_RECENT_STEPS = 20
_LARGEST_CONFIGURATION_BYTES = 1 << 20
_NAMED = 8
_MOST_STEPS = 10**18


@dataclass(frozen=True)
class Summary:
    """One run at one moment.

    name         of its directory
    total_steps  as far as its first configuration and later overrides say; None if neither does
    recent       the newest of the steps that its state descends from, by step
    checkpoints  the committed ones, the oldest first
    notes        what could not be read
    """

    name: str
    path: Path
    now: float
    total_steps: int | None
    life: Life
    attempts: Sequence[Attempt]
    recent: Sequence[Step]
    checkpoints: Sequence[Listed]
    goodput: Goodput
    notes: Sequence[str]

    @property
    def newest(self) -> Step | None:
        """The last step that is kept."""
        return self.recent[-1] if self.recent else None

    @property
    def is_alive(self) -> bool:
        """Whether something of it seems to run still."""
        return self.life.state != ENDED

    @property
    def step(self) -> int:
        """The last step that it stands on."""
        committed = [one.manifest.step for one in self.checkpoints if one.manifest is not None]
        kept = [self.newest.step] if self.newest is not None else []
        return max([*(kept if self.is_alive else committed), 0])

    @property
    def is_complete(self) -> bool:
        """Whether it has come to its last step, and that is committed."""
        return not self.is_alive and self.total_steps is not None and self.step >= self.total_steps

    @property
    def expected_bytes(self) -> int | None:
        """What the next checkpoint is likely to have: as many as the newest one."""
        for one in reversed(self.checkpoints):
            if one.manifest is not None:
                return describe.total_bytes(one.manifest)
        return None

    def lives(self, attempt: Attempt) -> bool:
        """Whether an attempt is the one that seems to run still."""
        return self.is_alive and attempt is living(self.attempts)

    def broke_off(self, attempt: Attempt) -> bool:
        """Whether an attempt was killed or has failed: it neither stopped as asked, nor lives."""
        return not self.lives(attempt) and attempt.exit_code not in (0, 75)


def summarize(path: Path, clock: float | None = None) -> Summary:
    """Look at the run at `path`. Raises nothing for what is damaged: that is in `notes`."""
    now = time.time() if clock is None else clock
    found = records.read(path)
    notes = list(found.notes)
    attempts = attempts_of(found)
    lost = [str(one.number) for one in attempts if not one.details and one.number is not None]
    if lost:
        named = ", ".join(lost[:_NAMED]) + (" ..." if len(lost) > _NAMED else "")
        notes.append(f"attempts.jsonl: how attempt {named} began is not in it")
    configuration = _configuration(path, notes)
    directory = _checkpoints_of(path, configuration, notes)
    life = life_of(directory)
    return Summary(
        name=lines.text(os.path.basename(os.path.realpath(path))),
        path=path,
        now=now,
        total_steps=_total_steps(configuration, attempts),
        life=life,
        attempts=attempts,
        recent=newest_kept(attempts, _RECENT_STEPS),
        checkpoints=_listing(directory, notes),
        goodput=goodput(attempts, now if life.state in (RUNNING, FINISHING) else None),
        notes=notes,
    )


def loss_text(loss: float) -> str:
    """Return a loss for people."""
    return f"{loss:.4f}" if abs(loss) < 1e6 else f"{loss:.4g}"


def _configuration(path: Path, notes: list[str]) -> Mapping[str, Any]:
    import yaml

    try:
        with open(path / "config.yaml", "rb") as file:
            text = file.read(_LARGEST_CONFIGURATION_BYTES).decode()
        loaded = yaml.safe_load(text)
    except OSError as error:
        notes.append(f"config.yaml: {error.strerror}")
        return {}
    # ValueError of what is no UTF-8, or no number or date although it looks like one.
    except (yaml.YAMLError, ValueError, RecursionError):
        notes.append("config.yaml is damaged")
        return {}
    if not isinstance(loaded, dict):
        notes.append("config.yaml is damaged")
        return {}
    return loaded


def _checkpoints_of(
    path: Path, configuration: Mapping[str, Any], notes: list[str]
) -> CheckpointDirectory:
    """Where the configuration says; where a run's checkpoints usually are if it was moved."""
    own = path / "checkpoints"
    configured = _section(configuration, "checkpoint").get("dir")
    if os.path.isdir(own) or not isinstance(configured, str):
        return CheckpointDirectory(str(own.absolute()))
    try:
        os.stat(configured)
    except ValueError:
        notes.append("config.yaml: checkpoint.dir is no path that can be")
        return CheckpointDirectory(str(own.absolute()))
    except OSError as error:
        notes.append(f"{lines.text(configured)}: {error.strerror}")
    return CheckpointDirectory(configured)


def _listing(directory: CheckpointDirectory, notes: list[str]) -> Sequence[Listed]:
    try:
        return inspect.listing(inspect.Place(directory), strays=False)
    except OSError as error:
        notes.append(f"{lines.text(directory.root)}: {error.strerror}")
        return []


def _total_steps(configuration: Mapping[str, Any], attempts: Sequence[Attempt]) -> int | None:
    steps = _section(configuration, "train").get("steps")
    for attempt in attempts:
        for override in attempt.overrides:
            name, _, value = override.partition("=")
            if name.lstrip("+") == "train.steps" and value.isascii() and value.isdigit():
                steps = int(value)
    return steps if type(steps) is int and 0 <= steps < _MOST_STEPS else None


def _section(configuration: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = configuration.get(name)
    return section if isinstance(section, dict) else {}
