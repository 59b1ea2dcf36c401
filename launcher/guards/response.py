"""What rank 0 does about an alarm, and says: going back, or stopping for a person.

By then the attempt is closed and its last save committed. Nothing here raises: the other ranks wait
for the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.format.errors import FormatError
from engine.format.manifest import Draft
from engine.protocol import takeover
from engine.protocol.layout import CheckpointDirectory
from launcher.config import Settings
from launcher.errors import ConfigError
from launcher.guards.guard import IDENTICAL_WEIGHTS, Alarm
from launcher.guards.rollback import Range, RefusedRollbackError, Rollbacks, newest_sound
from launcher.progress import Progress

BACK = "back"
STOP = "stop"


@dataclass(frozen=True)
class Response:
    """Rank 0's answers to the alarms of one run. `rollbacks` are the run's."""

    settings: Settings
    rollbacks: Rollbacks
    progress: Progress

    def to(self, alarm: Alarm, attempt: int, skip: Range) -> str:
        """Do what the alarm's action says, and return which it was: BACK or STOP.

        Args:
            attempt: whose alarm it is.
            skip: the samples that a rollback leaves out.
        """
        sound: Draft | None = None
        try:
            committed = self._committed(attempt)
            sound = newest_sound(committed, [*self.rollbacks.ranges(), skip])
            if alarm.action == "rollback":
                self._go_back(alarm, attempt, skip, committed)
                return BACK
            why = f"guard.on_{alarm.kind}=stop"
        except (RefusedRollbackError, ConfigError, FormatError, OSError) as error:
            why = str(error)
        self.progress.say(self._advice(alarm, skip, why, sound))
        return STOP

    def _committed(self, attempt: int) -> list[Draft]:
        """Return what there is to go back to, in either tier, newest step first."""
        directory = CheckpointDirectory(self.settings.checkpoint.dir)
        shared, _ = takeover.committed(directory)
        local, _ = takeover.local_candidates(directory, attempt + 1)
        return sorted([*shared, *local], key=lambda manifest: -manifest.step)

    def _go_back(self, alarm: Alarm, attempt: int, skip: Range, committed: Sequence[Draft]) -> None:
        limit = self.settings.guard.max_rollbacks
        target = self.rollbacks.go_back(alarm, attempt, skip, limit, committed)
        self.progress.event(
            {
                "event": "rolled_back",
                "step": alarm.step,
                "kind": alarm.kind,
                "tag": target.tag,
                "to_step": target.step,
                "skip": list(skip),
            }
        )
        self.progress.say(
            f"guard: {alarm.words}. The run goes back to {target.tag}, and leaves out the samples "
            f"{skip[0]} to {skip[1]} (global indices): rollback {len(self.rollbacks.ranges())} of "
            f"guard.max_rollbacks={limit}."
        )

    def _advice(self, alarm: Alarm, skip: Range, why: str, sound: Draft | None) -> str:
        run = self.settings.run
        if alarm.kind == IDENTICAL_WEIGHTS:
            return (
                f"guard: {alarm.words}. The run stops, and saves no more: {why}.\n"
                f"  To see how little moves: python -m engine diff {run.dir} TAG TAG\n"
                f"  To go on all the same:   guard.on_{alarm.kind}=warn"
            )
        back = "" if sound is None else f"resume={sound.tag} "
        return (
            f"guard: {alarm.words}. The run stops without saving that step: {why}.\n"
            f"  To see the batch:      python -m engine stream {run.dir} --step {alarm.step}\n"
            f"  To leave it out:       {back}'data.skip=[[{skip[0]},{skip[1]}]]'\n"
            f"  To go on all the same: guard.on_{alarm.kind}=warn"
        )
