"""Asked to stop: from signals to a flag, to one decision of all ranks at a step edge.

The handlers set a flag, nothing else, so a signal may come at any moment, as often as it likes:
in a backward pass, in a collective, during the save that an earlier one led to. `Agreement` turns
the flags of all ranks into the same answer on every rank; any one rank is enough.

Importing this module imports nothing heavy: handlers are in place before torch is imported.
"""

import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


class StopRequest:
    """Whether this rank was asked to stop, and by what first."""

    def __init__(self) -> None:
        self.cause: str | None = None
        """The name of a signal, or what `ask` was told."""

    def install(self) -> None:
        """Take over the stop signals of this process and unblock them. Main thread only.

        USR1 is ignored: the keeper turns it into a stop request, and it may reach all processes of
        a Slurm step at once, of which this one would die.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGUSR1})

    def ignore_from_now_on(self) -> None:
        """Ignore the stop signals: the run is over, and a late one must not change how it ends.

        SIG_IGN and not a handler, because Python resets handlers, but not this, while it exits.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def ask(self, cause: str) -> None:
        """Ask this rank to stop for another reason than a signal."""
        if self.cause is None:
            self.cause = cause

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop, by a signal or by `ask`."""
        return self.cause is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.ask(signal.Signals(number).name)


class Edge:
    """What all ranks agreed on at one step edge."""

    def __init__(
        self,
        loss: float,
        stop: bool,
        save: bool,
        stop_file: bool = False,
        alarm: bool = False,
    ) -> None:
        self.loss = loss
        """Mean over ranks, in float64."""
        self.stop = stop
        """Some rank was asked to stop, by a signal or by the file."""
        self.save = save
        """Rank 0's clock says that a save is due, or the SAVE file does."""
        self.stop_file = stop_file
        """Rank 0 has seen the STOP file: the run is not to be started again by itself."""
        self.alarm = alarm
        """Rank 0 has learnt something of a commit that the run must act upon."""


class Agreement:
    """One small all-reduce per step, on a CPU group, under way while the optimizer works.

    Args:
        group: a gloo process group of all ranks that nothing else uses.
        world_size: its size.
    """

    def __init__(self, group: Any, world_size: int) -> None:
        self._group = group
        self._world_size = world_size

    def begin(
        self,
        *,
        loss: float,
        stop: bool,
        save: bool,
        stop_file: bool = False,
        alarm: bool = False,
    ) -> Callable[[], Edge]:
        """Send this rank's part and return the function that waits for the sum. Collective.

        A sum of flags above zero is an `or`, so the loss and the flags travel together.
        """
        import torch

        values = torch.tensor([loss, stop, save, stop_file, alarm], dtype=torch.float64)
        work = torch.distributed.all_reduce(values, group=self._group, async_op=True)

        def wait() -> Edge:
            work.wait()
            return self._edge(values)

        return wait

    def _edge(self, values: "torch.Tensor") -> Edge:
        loss_sum, stops, saves, stop_files, alarms = values.tolist()
        return Edge(
            loss_sum / self._world_size,
            stop=stops > 0 or stop_files > 0,
            save=saves > 0,
            stop_file=stop_files > 0,
            alarm=alarms > 0,
        )
