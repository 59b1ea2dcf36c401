"""What the ranks of the tests in this folder do. Each function runs on every rank."""

import os
from typing import Any

import engine
from tests.holds.kinds import KINDS, Kind, make_engine, train
from tests.holds.state import slices_of, state_of

_HALF, _WHOLE = 4, 8


def continues_exactly(directory: str, names: list[str]) -> dict[str, Any]:
    """Run every kind of `names` in one go, and in halves with a resume; return what differs."""
    return {
        name: _in_halves(os.path.join(directory, str(i)), KINDS[name])
        for i, name in enumerate(names)
    }


def _in_halves(directory: str, kind: Kind) -> dict[str, Any]:
    whole = make_engine(kind)
    losses = train(whole, kind, 1, _WHOLE)
    first = make_engine(kind)
    checkpointer = engine.attach(first, directory)
    assert checkpointer.resume("auto") is None
    halves = train(first, kind, 1, _HALF)
    saved, slices = state_of(first), slices_of(first)
    assert checkpointer.save(_HALF, sample_offset=0)
    assert checkpointer.close()
    second = make_engine(kind)
    fresh = state_of(second)
    checkpointer = engine.attach(second, directory)
    assert checkpointer.resume("must").step == _HALF
    resumed = state_of(second)
    halves += train(second, kind, _HALF + 1, _WHOLE)
    checkpointer.close()
    return {
        "losses": [losses, halves],
        "moved": [name for name in saved if saved[name] != fresh.get(name)],
        "resumed": differences(saved, resumed),
        "at the end": differences(state_of(whole), state_of(second)),
        "skipped": second.skipped_steps,
        "slices": slices,
    }


def resumes_elsewhere(directory: str, names: list[str]) -> dict[str, dict[str, str]]:
    """Resume what `continues_exactly` has saved, and take a step; return what was resumed."""
    resumed = {}
    for i, name in enumerate(names):
        ds_engine = make_engine(KINDS[name])
        checkpointer = engine.attach(ds_engine, os.path.join(directory, str(i)))
        assert checkpointer.resume("must").step == _HALF
        resumed[name] = slices_of(ds_engine)
        train(ds_engine, KINDS[name], _HALF + 1, _HALF + 1)
        checkpointer.close()
    return resumed


def refuses_lost_groups(directory: str) -> str:
    """Attach to an engine whose optimizer has lost a param group; return what that says."""
    ds_engine = make_engine(Kind("Adagrad"))
    try:
        engine.attach(ds_engine, directory)
    except engine.RefusedError as error:
        return str(error)
    raise AssertionError("it was not refused")


def differences(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    """Return a line for each name at which two states differ."""
    return [
        f"{name}: wanted {wanted.get(name)}, found {found.get(name)}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
