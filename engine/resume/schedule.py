"""The learning rate schedule of a checkpoint, where this run has one of another kind.

DeepSpeed hands a stored schedule to the live one, which fails on a stranger's state when half of
everything is loaded. A checkpoint of the same loop never has one; an imported checkpoint may.
"""

import logging
from typing import Any

from engine.checkpoint.session import Session
from engine.format.manifest import Manifest

logger = logging.getLogger(__name__)


def state_to_load(session: Session, manifest: Manifest, stored: dict[str, Any] | None) -> Any:
    """Return the state that the live schedule is to load: `stored`, or its own where that is alien.

    Alien is a state that has no name in common with the live one's. It is an event then: whoever
    drives the schedule has to set it to where the run stands.
    """
    live = session.ds_engine.lr_scheduler
    if live is None:
        return stored
    own = live.state_dict()
    if stored is not None and stored.keys() & own.keys():
        return stored
    was = "no schedule" if stored is None else f"one that keeps {', '.join(map(repr, stored))}"
    reason = (
        f"the schedule is not carried over: {manifest.tag} has {was}, this run a "
        f"{type(live).__name__}, which stays where it is"
    )
    if session.rank == 0:
        logger.warning("%s", reason)
    session.emit("schedule_not_carried", tag=manifest.tag, reason=reason)
    return own
