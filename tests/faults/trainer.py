"""The driver's torch-free trainer, held at a moment of a save; one save at a time.

python -m tests.faults.trainer FAULT SETTINGS

`tests.faults.kept` runs it below a keeper and a starter.
"""

import functools
import json
import sys
from typing import Any

from engine.checkpoint.handover import Handover
from engine.checkpoint.writer_link import Seal, WriterLink
from launcher.stop import StopRequest
from tests.faults.points import MID_COPY, STAGED, TRAINER, Fault, Trap, writer_command
from tests.protocol.driver import trainer
from tests.protocol.driver.trainer import Settings

_SETTLE_SECONDS = 120.0


class _OneAtATime(Handover):
    """Seals a save when the one before it is settled: the moments before leave no other choice."""

    def hand_over(self, seal: Seal, image: int, descriptor: int) -> None:
        self.settle(_SETTLE_SECONDS)
        super().hand_over(seal, image, descriptor)


class _HeldTrainer(trainer._Trainer):
    def __init__(self, settings: Settings, fault: Fault, stop: StopRequest | None) -> None:
        super().__init__(settings)
        self._stop = stop
        mine = (fault.process, fault.rank) == (TRAINER, settings.rank)
        self._mid_copy = Trap(fault) if mine and fault.moment == MID_COPY else None
        self._staged = Trap(fault) if mine and fault.moment == STAGED else None
        self._tell_driver, self._tell = self._tell, self._tell_and_hold

    def _tell_and_hold(self, event: str, **fields: Any) -> None:
        self._tell_driver(event, **fields)
        if event == "sealed" and self._staged is not None:
            self._staged.reach()

    def _goes_on(self, count: int) -> bool:
        asked_to_stop = self._stop is not None and self._stop.requested
        return super()._goes_on(count) and not asked_to_stop

    def _stage(self, image: trainer._Image, data: bytes, count: int) -> None:
        if self._mid_copy is not None:
            half = len(data) // 2
            image.mapping[:half] = data[:half]
            self._mid_copy.reach()
        super()._stage(image, data, count)


def run(
    fault: str, settings: str, keeper_fd: int | None = None, stop: StopRequest | None = None
) -> int:
    """Be one rank, of a fault and settings in JSON; return its exit code.

    `keeper_fd` is a pipe end for the writer to hold. Asked to `stop`, it does after its save.
    """
    parsed, own = Fault(**json.loads(fault)), Settings(**json.loads(settings))
    command = writer_command(parsed, own.rank)
    trainer.WriterLink = functools.partial(WriterLink, command=command, keeper_fd=keeper_fd)
    trainer.Handover = _OneAtATime
    return _HeldTrainer(own, parsed, stop).run()


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
