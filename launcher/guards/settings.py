"""The `guard` section: what is an alarm, and what follows one."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from launcher.errors import ConfigError
from launcher.schema import at_least

Action: TypeAlias = Literal["warn", "stop", "rollback"]

_LEAST_WINDOW_STEPS = 8


@dataclass(frozen=True)
class GuardSettings:
    """The `guard` section."""

    on_nonfinite: Action
    """A loss or a gradient norm that is no finite number. DeepSpeed leaves out the step of such a
    norm; under fp16 that is how the loss scale is found, and no alarm."""
    on_spike: Action
    """A loss far above those before it."""
    on_identical_weights: Literal["warn", "stop"]
    """Two checkpoints in a row with the same weights, bit for bit, though a step between them was
    made, and with a learning rate: training does not train."""
    window_steps: int
    """A loss is compared with those of so many steps before it."""
    min_steps: int
    """Nothing is a spike before so many losses are known."""
    threshold: float
    """How far above the window's median a spike is, in robust standard deviations (1.4826 times
    the median distance from the median)."""
    skip_steps_before: int
    """A rollback leaves out the samples of the step with the alarm, and of so many before it."""
    skip_steps_after: int
    """And those of so many steps that would have come next."""
    max_rollbacks: int
    """At the next alarm after so many rollbacks in the life of the run, it stops instead."""

    def __post_init__(self) -> None:
        at_least("guard.window_steps", self.window_steps, _LEAST_WINDOW_STEPS)
        at_least("guard.min_steps", self.min_steps, _LEAST_WINDOW_STEPS)
        for name in ("skip_steps_before", "skip_steps_after", "max_rollbacks"):
            at_least(f"guard.{name}", getattr(self, name), 0)
        if self.min_steps > self.window_steps:
            raise ConfigError(
                f"guard.min_steps={self.min_steps} is more than "
                f"guard.window_steps={self.window_steps}, so that no loss would ever be a spike."
            )
        if self.threshold <= 0:
            raise ConfigError(f"guard.threshold={self.threshold}: wanted a number above 0.")
