"""Is a checkpoint one of this run? What exactness rests on, recorded and compared.

Every checkpoint carries the run's identity: the fingerprint of its data, and the settings that
decide what the next step computes. Resuming under others would go on without an error and without
meaning, so a difference is one. The optimizer's settings and the schedule's may change, which is
said; so may the plan of the data ahead of where the run stands. World size and micro batch are free
to change, and not recorded. What the data sets are made from is recorded for `python -m engine
stream` and not compared: a file may move.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.exchange import companions
from engine.exchange.description import IMPORTED_FROM
from engine.format.manifest import Draft
from engine.stream import FingerprintMismatch, Stream
from launcher.config import Settings
from launcher.errors import ConfigError
from launcher.schema import differences, first_difference


def identity(
    settings: Settings, stream: Stream, record: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what every checkpoint of the run records, as JSON.

    Args:
        record: of a Hugging Face model, what `engine.exchange.companions` keeps of it.
    """
    plain = settings.as_dict()
    return {
        **({} if record is None else {companions.RECORD: dict(record)}),
        "data": stream.fingerprint(),
        "components": plain["data"]["components"],
        "fixed": {
            "seed": settings.seed,
            "batch.global_size": settings.batch.global_size,
            "model": _model(settings, record),
            "precision": _precision(settings),
            **({} if settings.init_from is None else {"model.init_from": settings.init_from}),
        },
        "free": {
            "optimizer": {**plain["optimizer"], "betas": _as_list(settings.optimizer.betas)},
            "schedule": plain["schedule"],
            "train.steps": settings.train.steps,
        },
    }


@dataclass(frozen=True)
class Findings:
    """What differs between this run and a checkpoint that it may go on from.

    free  a sentence about each setting that changed and may
    data  what `data.accept_changed` accepted: lines for people; empty for nothing
    """

    free: tuple[str, ...]
    data: tuple[str, ...]


def check(
    manifest: Draft,
    settings: Settings,
    stream: Stream,
    record: Mapping[str, Any] | None = None,
) -> Findings:
    """Compare this run's identity with the one that a checkpoint recorded.

    Args:
        record: as for `identity`.

    Raises:
        ConfigError: the data, or a setting that exactness rests on, differ; stored and current
            stand on separate lines.
    """
    stored, tag = manifest.fingerprint, manifest.tag
    if isinstance(stored, Mapping) and IMPORTED_FROM in stored:
        return Findings(
            (
                f"{tag} was imported from {stored[IMPORTED_FROM]['directory']} and does not say "
                "with which data and settings it was trained; those of this run are taken",
            ),
            (),
        )
    if not isinstance(stored, Mapping) or not {"data", "fixed", "free"} <= stored.keys():
        raise ConfigError(
            f"checkpoint {tag} was not saved by this launcher: it does not say which run it "
            "belongs to. Resume it with the loop that saved it, or give another run.name."
        )
    current = identity(settings, stream, record)
    difference = first_difference(stored["fixed"], current["fixed"])
    if difference:
        key, before, now = difference
        raise ConfigError(
            f"checkpoint {tag} belongs to a run with another {key}:\n"
            f"  in the checkpoint: {before!r}\n"
            f"  now:               {now!r}\n"
            "  Set it back to resume, or start a new run with another run.name."
        )
    free = tuple(
        f"{key} was {before!r} when {tag} was saved and is {now!r} now"
        for key, before, now in differences(stored["free"], current["free"])
    )
    return Findings(free, _data_changes(manifest, settings, stream))


def accepted_changes(manifest: Draft, accepted: tuple[str, ...]) -> list[Any]:
    """Return what this run's manifests say of changed data: the checkpoint's list, and the new.

    Args:
        accepted: `Findings.data`.
    """
    stream = manifest.stream
    before = stream.get("accepted_changes", []) if isinstance(stream, Mapping) else []
    assert isinstance(before, list)  # a launcher wrote it
    if not accepted:
        return before
    return [*before, {"sample_offset": manifest.sample_offset, "differences": list(accepted)}]


def _data_changes(manifest: Draft, settings: Settings, stream: Stream) -> tuple[str, ...]:
    assert isinstance(manifest.fingerprint, Mapping)  # check() has seen to it
    stored = manifest.fingerprint["data"]
    assert isinstance(stored, Mapping)
    try:
        stream.compare(stored, manifest.sample_offset)
    except FingerprintMismatch as error:
        if settings.data.accept_changed:
            return tuple(error.differences)
        raise ConfigError(f"checkpoint {manifest.tag}: {error}") from error
    return ()


def _model(settings: Settings, record: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what the model is made from: of a Hugging Face one not where its config lay."""
    arguments = settings.model_arguments
    if record is None:
        return arguments
    config = dict(record["documents"][companions.CONFIG_NAME])
    del config["transformers_version"]
    return {**arguments, "path": companions.CONFIG_NAME, companions.CONFIG_NAME: config}


def _precision(settings: Settings) -> str:
    for name in ("bf16", "fp16"):
        if settings.deepspeed.get(name, {}).get("enabled") is True:
            return name
    return "fp32"


def _as_list(values: tuple[float, ...] | None) -> list[float] | None:
    return None if values is None else list(values)
