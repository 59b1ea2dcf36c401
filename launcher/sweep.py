"""Several runs from one command: `everstep -m optimizer.lr=1e-4,3e-4`.

Hydra's own multirun would run every job in one process and give it a directory with a time in it.
Here each combination is a run like any other, with a name of its own, one after the other; or all
together are the tasks of one Slurm array. Every run is composed before the first one starts, so a
mistake in the last costs nothing. Given again, a sweep resumes each run where it was.
"""

import hashlib
import re
import sys
from collections.abc import Callable, MutableMapping, Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from launcher import explain, requeue, start
from launcher.config import Settings
from launcher.errors import ConfigError
from launcher.launch_settings import SlurmLaunch
from launcher.wakeup import SignalQueue

_LONGEST_NAME = 120

Compose = Callable[[Sequence[str]], Settings | ConfigError | None]
Job = tuple[Settings, Sequence[str]]


def run(arguments: Sequence[str], environ: MutableMapping[str, str], compose: Compose) -> int:
    """Run every combination, and return the exit code.

    A stop ends the sweep with 75. A run that fails does not keep the others from running; the
    sweep's code is then that of the first that failed.
    """
    try:
        jobs = plan(arguments, compose)
        launch = jobs[0][0].launch
        if isinstance(launch, SlurmLaunch):
            return _submit(jobs, launch, environ)
        for settings, _ in jobs:
            start.check(settings, start.ranks_of(settings, environ))
    except ConfigError as error:
        return start.refuse(error, environ, requeue.BAD_CONFIG)
    signals = SignalQueue(start.SIGNALS)
    failed = requeue.DONE
    for number, (settings, words) in enumerate(jobs, 1):
        print(f"everstep: run {number} of {len(jobs)}: {settings.run.name}", file=sys.stderr)
        code = start.start(settings, words, environ, signals)
        if code == requeue.SAVED or signals.seen:
            return code
        failed = failed or code
    return failed


def plan(arguments: Sequence[str], compose: Compose) -> list[Job]:
    """Return the settings and the arguments of every run.

    Raises:
        ConfigError: one of them does not compose, or two would have the same directory.
    """
    combinations = _combinations(arguments)
    plain = [_composed(compose, words) for words in combinations]
    if _are_apart(plain):
        return list(zip(plain, combinations, strict=True))
    swept = [name for name in map(_key, arguments) if len({*_values(name, combinations)}) > 1]
    named = [
        [*words, f"run.name={name_of(settings.run.name, words, swept)}"]
        for settings, words in zip(plain, combinations, strict=True)
    ]
    settled = [_composed(compose, words) for words in named]
    if not _are_apart(settled):
        raise ConfigError(
            f"the {len(settled)} runs of this sweep would share the directory {settled[0].run.dir} "
            "or its checkpoints: give directories that hold the run's name, such as\n"
            "  'run.dir=runs/${run.name}'"
        )
    return list(zip(settled, named, strict=True))


def name_of(base: str, arguments: Sequence[str], swept: Sequence[str]) -> str:
    """Return a run's name: the base, and what the sweep varies, as a directory may be called."""
    parts = [word for word in arguments if _key(word) in swept]
    text = ",".join(parts)
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")
    if len(safe) > _LONGEST_NAME:
        safe = f"{safe[:_LONGEST_NAME]}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
    return f"{base}_{safe}"


def _submit(jobs: Sequence[Job], launch: SlurmLaunch, environ: MutableMapping[str, str]) -> int:
    from launcher import launch_slurm

    for settings, _ in jobs:
        if settings.launch != launch:
            raise ConfigError(
                "the runs of this sweep differ in launch.*, and one Slurm array has one size: "
                "submit them by a command each."
            )
        start.check(settings, launch.ranks)
    return launch_slurm.run(jobs, launch, environ)


def _combinations(arguments: Sequence[str]) -> list[list[str]]:
    try:
        overrides = OverridesParser.create().parse_overrides(list(arguments))
    except OverrideParseException as error:
        raise explain.explain(error) from error
    (batch,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return [list(words) for words in batch]


def _composed(compose: Compose, words: Sequence[str]) -> Settings:
    composed = compose(words)
    if isinstance(composed, Settings):
        return composed
    if composed is None:
        raise ConfigError("-m runs something: leave out --help, --cfg and their like.")
    raise ConfigError(f"{' '.join(words)}: {composed}")


def _are_apart(jobs: Sequence[Settings]) -> bool:
    places = [{settings.run.dir for settings in jobs}, {s.checkpoint.dir for s in jobs}]
    return all(len(names) == len(jobs) for names in places)


def _values(key: str, combinations: Sequence[Sequence[str]]) -> list[str]:
    return [word for words in combinations for word in words if _key(word) == key]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")
