"""Going back from an alarm: the samples that are left out from then on, and what they have spoilt.

A rollback is one line of the run's rollbacks.jsonl, durable before anything else happens. All that
follows is made from that file: whoever starts the run adds the ranges to `data.skip`, and passes
over every checkpoint that has used a sample of them; the newest of the others is where the run goes
on, and the tags behind it become strays, as with `resume=TAG`. So a rollback that is killed at any
moment has either happened or not, and which of the two does not depend on who is left alive.

Rank 0 only; the file is never written over.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from engine.format.manifest import Draft
from engine.stream.skips import Skips
from launcher.errors import ConfigError
from launcher.guards.guard import Alarm
from launcher.guards.settings import GuardSettings
from launcher.run_directory import JsonLines

Range: TypeAlias = tuple[int, int]
"""Global indices from the first up to the second, which is not in it."""


class RefusedRollbackError(Exception):
    """There is no going back; says why."""


class Rollbacks:
    """The rollbacks of one run."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines
        self.path = lines.path

    def ranges(self) -> list[Range]:
        """Return what is left out, one range for each rollback, oldest first.

        Raises:
            ConfigError: the file cannot be read, or holds something else.
        """
        try:
            records = self._lines.read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}, the record of rollbacks: {error}") from error
        found = []
        for record in records:
            match record:
                case {"skip": [int(first), int(end)]} if 0 <= first < end:
                    found.append((first, end))
                case _:
                    raise ConfigError(
                        f"{self.path}: found {record!r}, wanted the record of a rollback, with "
                        '"skip": [first, end]. Mend the line: a run that forgets what it left out '
                        "is another run."
                    )
        return found

    def go_back(
        self, alarm: Alarm, attempt: int, skip: Range, limit: int, committed: Sequence[Draft]
    ) -> Draft:
        """Make a rollback happen, and return the checkpoint that it goes back to.

        Args:
            attempt: whose alarm it is.
            skip: what it leaves out.
            limit: of rollbacks, in the life of the run.
            committed: the checkpoints there are, newest step first.

        Raises:
            RefusedRollbackError: there were too many, or no checkpoint is from before `skip`.
            ConfigError: as from `ranges`.
            OSError: it cannot be recorded.
        """
        before = self.ranges()
        if len(before) >= limit:
            raise RefusedRollbackError(
                f"all of guard.max_rollbacks={limit} have been made in the life of the run"
            )
        target = newest_sound(committed, [*before, skip])
        if target is None:
            raise RefusedRollbackError(
                "no checkpoint is left from before the samples that would be left out; "
                "checkpoint.keep_last and guard.skip_steps_before say how far back there is one"
            )
        self._lines.append_durably(
            {
                "attempt": attempt,
                "step": alarm.step,
                "kind": alarm.kind,
                "loss": repr(alarm.loss),
                "to_step": target.step,
                "skip": list(skip),
            }
        )
        return target


def window(
    settings: GuardSettings, skips: Skips, *, sample_offset: int, global_batch_size: int
) -> Range:
    """Return the samples to leave out after an alarm.

    Args:
        skips: of the stream, as it was read.
        sample_offset: after the step with the alarm.
    """
    first = sample_offset - (settings.skip_steps_before + 1) * global_batch_size
    end = sample_offset + settings.skip_steps_after * global_batch_size
    return skips.global_index(max(0, first)), skips.frontier(end)


def why_spoilt(manifest: Draft, ranges: Sequence[Range]) -> str:
    """Return why a checkpoint is not to be used: a sample of `ranges` that it has used, or ""."""
    data = manifest.fingerprint.get("data") if isinstance(manifest.fingerprint, Mapping) else None
    if not isinstance(data, Mapping):
        return ""  # no launcher saved it: that is for others to judge
    skipped = Skips(data["skip"])
    frontier = skipped.frontier(manifest.sample_offset)
    for first, end in ranges:
        if Skips([*skipped.ranges, (first, end)]).before(frontier) != skipped.before(frontier):
            return f"it has used samples of {first} to {end} (global indices), which are left out"
    return ""


def newest_sound(manifests: Sequence[Draft], ranges: Sequence[Range]) -> Draft | None:
    """Return the first of the manifests that has used nothing of `ranges`."""
    return next((one for one in manifests if not why_spoilt(one, ranges)), None)
