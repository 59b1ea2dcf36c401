"""How the launcher uses the engine: the options of saving, and refusals as its own errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import engine
from engine.format.errors import FormatError
from launcher.config import Settings
from launcher.errors import LauncherError


def options_of(settings: Settings) -> engine.CheckpointOptions:
    """Return what `engine.attach` is to be given."""
    checkpoint = settings.checkpoint
    best = checkpoint.keep_best
    return engine.CheckpointOptions(
        local_dir=checkpoint.local_dir,
        keep_last=checkpoint.keep_last,
        keep_every_steps=checkpoint.keep_every_steps,
        keep_best=None if best is None else engine.KeepBest(**asdict(best)),
        bytes_per_second=checkpoint.max_bytes_per_second,
        commit_deadline_seconds=checkpoint.commit_deadline_seconds,
        lease=engine.Lease(seconds=checkpoint.lease_seconds),
        writer_silence_seconds=checkpoint.writer_silence_seconds,
        max_failures=checkpoint.max_failures,
        when_busy=checkpoint.when_busy,
        exclude_frozen=checkpoint.exclude_frozen,
        base_name=settings.init_from or settings.model["_target_"],
        verify_on_resume=checkpoint.verify_on_resume,
        paranoid=checkpoint.paranoid,
    )


@contextmanager
def refusals_as(kind: type[LauncherError]) -> Iterator[None]:
    """What the engine refuses at start is about the directory, the model or the data."""
    try:
        yield
    except (
        engine.CheckpointError,
        engine.ExchangeError,
        engine.ResumeError,
        engine.RunHeldError,
        engine.UnsuitableDirectoryError,
        FormatError,
    ) as error:
        refusal = kind(str(error))
        refusal.settled = True  # the engine raises on every rank alike
        raise refusal from error
