"""How often to save, from what a save costs and how often the run dies: `checkpoint=auto`.

Pure: numbers in, numbers out; rank 0 plans and `launcher.cadence` keeps to it. The interval is
Daly's: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22 (2006), equation 37; to first order it is Young's
sqrt(2 * cost * MTBF) (Communications of the ACM 17, 1974). Their cost is the time that training
stands still: here the pause of a save, since the writing goes on beside the training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.requeue import BAD_CONFIG, DONE, NO_PROGRESS, SAVED
from launcher.seeing.timeline import Attempt

PRIOR_MTBF_SECONDS = 24 * 3600.0
"""Taken for the mean time between failures of a run that has not failed yet: as if it had failed
once after that long."""

_NOT_FAILURES = (DONE, SAVED, BAD_CONFIG, NO_PROGRESS)


@dataclass(frozen=True)
class Costs:
    """What was measured, in seconds.

    pause    training stands still for it at every save
    persist  from the end of the pause until the save is committed
    restart  from a death until the first step of the next attempt, as far as it is this run's
    """

    pause: float = 1.0
    persist: float = 0.0
    restart: float = 60.0


@dataclass(frozen=True)
class Plan:
    """An interval between saves, and what it is expected to cost.

    interval_seconds  of training between two saves
    expected_loss     share of the wall time, from 0 to 1, that saves and failures take
    limited_by_disk   whether a shorter interval would be better, but the disk could not keep up
    """

    interval_seconds: float
    expected_loss: float
    limited_by_disk: bool
    mtbf_seconds: float


def plan(costs: Costs, mtbf_seconds: float) -> Plan:
    """Return the best interval that the disk sustains."""
    best = optimal_interval_seconds(costs.pause, mtbf_seconds)
    interval = max(best, costs.persist)
    loss = expected_loss(interval, costs, mtbf_seconds)
    return Plan(interval, loss, interval > best, mtbf_seconds)


def optimal_interval_seconds(pause_seconds: float, mtbf_seconds: float) -> float:
    """Return Daly's optimum of the training time between two saves, the pause not included."""
    if pause_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = pause_seconds / (2 * mtbf_seconds)
    young = math.sqrt(2 * pause_seconds * mtbf_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - pause_seconds


def expected_loss(interval_seconds: float, costs: Costs, mtbf_seconds: float) -> float:
    """Return the share of wall time that is lost with an interval, where failures are Poisson.

    Daly's equation 13 for the time to get through one interval with its pause, where a death takes
    the work since the last save and a restart; what was not yet committed by then is lost, too.
    """
    cycle = interval_seconds + costs.pause
    late = min(costs.persist, cycle)  # a death in this part of a cycle goes back one save further
    redone = late / mtbf_seconds * cycle
    exponent = min(cycle / mtbf_seconds, 700.0)  # exp(709) is the largest float
    wall = mtbf_seconds * math.exp(min(costs.restart / mtbf_seconds, 700.0)) * math.expm1(exponent)
    return 1 - interval_seconds / (wall + redone)


def estimated_mtbf_seconds(attempts: Sequence[Attempt]) -> float:
    """Return the mean time between failures of a run's attempts: time alive per death.

    A stop that was asked for is no failure: it saves first. Before the first one the prior
    counts, and afterwards as one observation among others.
    """
    alive = sum(attempt.span[1] - attempt.span[0] for attempt in attempts if attempt.span)
    failures = sum(
        attempt.from_step is not None and attempt.exit_code not in _NOT_FAILURES
        for attempt in attempts
    )
    return (alive + PRIOR_MTBF_SECONDS) / (failures + 1)
