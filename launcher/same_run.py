"""Is a checkpoint one of this run? What exactness rests on, recorded and compared.

Every checkpoint carries the run's identity: the fingerprint of its data, and the settings that
decide what the next step computes. Resuming under others would go on without an error and without
meaning, so a difference is one. The optimizer's settings and the schedule's may change, which is
said; world size and micro batch are free to change, and not recorded.
"""

from collections.abc import Mapping
from typing import Any

from engine.stream import FingerprintMismatch, Stream
from launcher.config import Settings
from launcher.errors import ConfigError
from launcher.schema import first_difference


def identity(settings: Settings, stream: Stream) -> dict[str, Any]:
    """Return what every checkpoint of the run records, as JSON."""
    plain = settings.as_dict()
    return {
        "data": stream.fingerprint(),
        "fixed": {
            "seed": settings.seed,
            "batch.global_size": settings.batch.global_size,
            "model": plain["model"],
            "precision": _precision(settings),
        },
        "free": {
            "optimizer": {**plain["optimizer"], "betas": _as_list(settings.optimizer.betas)},
            "schedule": plain["schedule"],
            "train.steps": settings.train.steps,
        },
    }


def check(stored: Any, settings: Settings, stream: Stream, tag: str) -> str | None:
    """Compare this run's identity with the one that a checkpoint recorded.

    Returns:
        A sentence about a setting that changed and may, or None.

    Raises:
        ConfigError: the data, or a setting that exactness rests on, differ; stored and current
            stand on separate lines.
    """
    if not isinstance(stored, Mapping) or not {"data", "fixed", "free"} <= stored.keys():
        raise ConfigError(
            f"checkpoint {tag} was not saved by this launcher: it does not say which run it "
            "belongs to. Resume it with the loop that saved it, or give another run.name."
        )
    current = identity(settings, stream)
    difference = first_difference(stored["fixed"], current["fixed"])
    if difference:
        key, before, now = difference
        raise ConfigError(
            f"checkpoint {tag} belongs to a run with another {key}:\n"
            f"  in the checkpoint: {before!r}\n"
            f"  now:               {now!r}\n"
            "  Set it back to resume, or start a new run with another run.name."
        )
    if not settings.data.accept_changed:
        try:
            stream.compare(stored["data"])
        except FingerprintMismatch as error:
            raise ConfigError(f"checkpoint {tag}: {error}") from error
    changed = first_difference(stored["free"], current["free"])
    if changed is None:
        return None
    key, before, now = changed
    return f"{key} was {before!r} when {tag} was saved and is {now!r} now"


def _precision(settings: Settings) -> str:
    for name in ("bf16", "fp16"):
        if settings.deepspeed.get(name, {}).get("enabled") is True:
            return name
    return "fp32"


def _as_list(values: tuple[float, ...] | None) -> list[float] | None:
    return None if values is None else list(values)
