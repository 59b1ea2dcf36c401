"""The driver's torch-free trainer, held at a moment of a save; one save at a time.

python -m tests.faults.trainer FAULT SETTINGS
"""

import functools
import json
import sys
from typing import Any

from engine.checkpoint.handover import Handover
from engine.checkpoint.writer_link import Seal, WriterLink
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
    def __init__(self, settings: Settings, fault: Fault) -> None:
        super().__init__(settings)
        mine = (fault.process, fault.rank) == (TRAINER, settings.rank)
        self._mid_copy = Trap(fault) if mine and fault.moment == MID_COPY else None
        self._staged = Trap(fault) if mine and fault.moment == STAGED else None
        self._tell_driver, self._tell = self._tell, self._tell_and_hold

    def _tell_and_hold(self, event: str, **fields: Any) -> None:
        self._tell_driver(event, **fields)
        if event == "sealed" and self._staged is not None:
            self._staged.reach()

    def _stage(self, image: trainer._Image, data: bytes, count: int) -> None:
        if self._mid_copy is not None:
            half = len(data) // 2
            image.mapping[:half] = data[:half]
            self._mid_copy.reach()
        super()._stage(image, data, count)


def main() -> int:
    """Be one rank; return its exit code."""
    fault = Fault(**json.loads(sys.argv[1]))
    settings = Settings(**json.loads(sys.argv[2]))
    command = writer_command(fault, settings.rank)
    trainer.WriterLink = functools.partial(WriterLink, command=command)
    trainer.Handover = _OneAtATime
    return _HeldTrainer(settings, fault).run()


if __name__ == "__main__":
    sys.exit(main())
