"""What the ranks of the tests in this folder do. Each function runs on every rank of its worlds."""

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

import engine
from engine.format.shard import read_header
from tests.checkpoint.cases import attach
from tests.format import build
from tests.resume import zoo
from tests.resume.worlds import Worlds

SIZES = (1, 2, 3, 4)
SAVED_AT = 3
LAST = 5
_SAVED_WITH = 300  # sub_group_size, in elements of a rank
_RESUMED_WITH = 8

Result = dict[str, Any]


def all_of_them(root: str) -> Result:
    """Run every case below in one process tree, each in a directory of its own."""
    os.makedirs(f"{root}/worlds", exist_ok=True)
    worlds = Worlds(f"{root}/worlds")
    results = {
        case.__name__: case(worlds, os.path.join(root, case.__name__))
        for case in (world_sizes, walks_back, rolls_back, loss_scale)
    }
    worlds.end()
    return results


def world_sizes(worlds: Worlds, root: str) -> Result:
    """Save in every world, and resume each save in every world; return both, by world size."""
    saved, resumed = {}, {}
    for size in SIZES:
        with worlds.of(size) as is_member:
            if is_member:
                saved[str(size)] = _save_and_go_on(f"{root}/{size}")
    for size in SIZES:
        with worlds.of(size) as is_member:
            for saved_by in SIZES if is_member else ():
                resumed[f"{saved_by} to {size}"] = _resume_and_go_on(f"{root}/{saved_by}")
    return {"saved": saved, "resumed": resumed}


def _save_and_go_on(directory: str) -> Result:
    """Train, save, train on without a disturbance."""
    ds_engine = zoo.make_engine(1, _SAVED_WITH)
    checkpointer, _ = attach(ds_engine, directory)
    checkpointer.resume("never")
    zoo.train(ds_engine, 1, SAVED_AT)
    state = zoo.state_of(ds_engine)
    _save(checkpointer, SAVED_AT)
    assert checkpointer.close()
    record = zoo.train(ds_engine, SAVED_AT + 1, LAST)
    shards = sorted(Path(directory, f"global_step{SAVED_AT}").glob("*.safetensors"))
    return {
        "state": state,
        "sub_groups": _sub_groups(ds_engine),
        "shards_bytes": [shard.stat().st_size for shard in shards],
        **record,
    }


def _resume_and_go_on(directory: str) -> Result:
    """Resume into an engine that has other values, settings and sub-groups; train on."""
    ds_engine = zoo.make_engine(2, _RESUMED_WITH)
    before = zoo.state_of(ds_engine)
    resumed, events = _resume(ds_engine, directory, "must")
    assert resumed.sample_offset == SAVED_AT * zoo.GLOBAL_BATCH
    state = zoo.state_of(ds_engine)
    record = zoo.train(ds_engine, resumed.step + 1, LAST)
    return {
        "before": before,
        "state": state,
        "sub_groups": _sub_groups(ds_engine),
        "events": events,
        "tied": ds_engine.module.tied.weight is ds_engine.module.head.weight,
        **record,
    }


def walks_back(worlds: Worlds, directory: str) -> Result:
    """Two ranks save steps 1 to 3; the shards of 2 and 3 are damaged; three ranks resume."""
    states: dict[str, Result] = {}
    with worlds.of(2) as is_member:
        if is_member:
            ds_engine = zoo.make_engine(1, _SAVED_WITH)
            checkpointer, _ = attach(ds_engine, directory, keep_last=3)
            checkpointer.resume("never")
            for step in (1, 2, 3):
                zoo.train(ds_engine, step, step)
                states[f"global_step{step}"] = zoo.state_of(ds_engine)
                _save(checkpointer, step)
            assert checkpointer.close()
            if dist.get_rank() == 0:
                _truncate(Path(directory, "global_step2", "rank_00000_of_00002.safetensors"))
                _garble(Path(directory, "global_step3", "rank_00001_of_00002.safetensors"))
    outcomes: dict[str, Result] = {}
    with worlds.of(3) as is_member:
        if is_member:
            for mode in ("must", "global_step3"):
                outcomes[mode] = _outcome(directory, mode, states)
            # Last, because it sets the tags that it has passed over aside.
            by_size = {"verify_on_resume": "size"}
            outcomes["size of 3"] = _outcome(directory, "auto", states, **by_size)
            outcomes["size of 2"] = _outcome(directory, "global_step2", states, **by_size)
            outcomes["auto"] = _outcome(directory, "auto", states)
    return outcomes


def _outcome(directory: str, mode: str, states: Result, **options: Any) -> Result:
    """Resume, and tell what came of it, and which saved state the engine has now."""
    ds_engine = zoo.make_engine(2, _RESUMED_WITH)
    outcome: Result = {"tag": None, "error": ""}
    events: list[Result] = []
    try:
        resumed, events = _resume(ds_engine, directory, mode, **options)
        outcome["tag"] = resumed.tag
        outcome["state"] = zoo.state_of(ds_engine)
    except engine.ResumeError as error:
        outcome["error"] = str(error)
    outcome["saved"] = states.get(outcome["tag"])
    outcome["damaged"] = [event["reason"] for event in events if event["event"] == "damaged"]
    return outcome


def rolls_back(worlds: Worlds, directory: str) -> Result:
    """Two ranks save steps 1 to 3. Three go back to 1 and save another 2, which one continues.

    Two ranks come back at last to the step 3 that was set aside.
    """
    result: Result = {}
    with worlds.of(2) as is_member:
        if is_member:
            ds_engine = zoo.make_engine(1, _SAVED_WITH)
            checkpointer, _ = attach(ds_engine, directory, keep_last=5)
            checkpointer.resume("never")
            for step in (1, 2, 3):
                zoo.train(ds_engine, step, step)
                result[f"step {step}"] = zoo.state_of(ds_engine)
                _save(checkpointer, step)
            assert checkpointer.close()
            result["first line"] = zoo.state_of(ds_engine)
    with worlds.of(3) as is_member:
        if is_member:
            ds_engine = zoo.make_engine(2, _RESUMED_WITH)
            checkpointer, events = attach(ds_engine, directory, keep_last=5)
            assert checkpointer.resume("global_step1").step == 1
            result["named"] = zoo.state_of(ds_engine)
            zoo.train(ds_engine, 2, 2)
            _save(checkpointer, 2)
            assert checkpointer.close()
            result["second line"] = zoo.state_of(ds_engine)
            result["strays"] = [e["tag"] for e in events if e["event"] == "stray"]
    with worlds.of(1) as is_member:
        if is_member:
            result["tags"] = sorted(n for n in os.listdir(directory) if n.startswith("global"))
            ds_engine = zoo.make_engine(2, _RESUMED_WITH)
            result["resumed"] = _resume(ds_engine, directory, "auto")[0].step
            result["continued"] = zoo.state_of(ds_engine)
    with worlds.of(2) as is_member:
        if is_member:
            strays = os.listdir(f"{directory}/.stray")
            (stray,) = (name for name in strays if name.startswith("global_step3."))
            ds_engine = zoo.make_engine(2, _RESUMED_WITH)
            result["stray"] = _resume(ds_engine, directory, stray)[0].step
            result["came back"] = zoo.state_of(ds_engine)
    return result


_FP16 = {
    "bf16": {"enabled": False},
    # So large that the first steps overflow: they are skipped, and the scale is halved each time.
    "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 3},
}


def loss_scale(worlds: Worlds, directory: str) -> Result:
    """Two ranks in fp16 overflow and save; two and three in fp16 resume, then two in bf16."""
    result: Result = {}
    with worlds.of(2) as is_member:
        if is_member:
            ds_engine = zoo.make_engine(1, _SAVED_WITH, **_FP16)
            checkpointer, _ = attach(ds_engine, directory)
            checkpointer.resume("never")
            zoo.train(ds_engine, 1, 12)
            _save(checkpointer, 12)
            assert checkpointer.close()
            result["saved"] = _scaling(ds_engine)
            result["resumed by 2"] = _scaling_after(directory, **_FP16)
    with worlds.of(3) as is_member:
        if is_member:
            result["resumed by 3"] = _scaling_after(directory, **_FP16)
    with worlds.of(2) as is_member:
        if is_member:
            result["into bf16"] = _scaling_after(directory)
    return result


def _scaling_after(directory: str, **settings: Any) -> Result:
    ds_engine = zoo.make_engine(2, _RESUMED_WITH, **settings)
    before = _scaling(ds_engine)
    _, events = _resume(ds_engine, directory, "must")
    result = _scaling(ds_engine)
    zoo.train(ds_engine, 13, 13)
    return {**result, "before": before["scaler"], "events": events}


def _scaling(ds_engine: Any) -> Result:
    optimizer = ds_engine.optimizer
    scaler = optimizer.loss_scaler
    state = zoo.state_of(ds_engine)
    return {
        "scale": scaler.cur_scale,
        "scaler": repr((type(scaler).__name__, sorted(vars(scaler).items()))),
        "dynamic": optimizer.dynamic_loss_scale,
        "skipped": ds_engine.skipped_steps,
        # what a change of precision rounds on the way is not compared
        "state": {n: v for n, v in state.items() if not n.startswith(("training", "frozen"))},
    }


def _resume(ds_engine: Any, directory: str, mode: str, **options: Any) -> tuple[Any, list[Result]]:
    """Resume in an attempt that ends at once; return what from, and the events."""
    checkpointer, events = attach(ds_engine, directory, **options)
    try:
        return checkpointer.resume(mode), events
    finally:
        checkpointer.close()


def _save(checkpointer: Any, step: int) -> None:
    assert checkpointer.save(step, sample_offset=step * zoo.GLOBAL_BATCH)


def _sub_groups(ds_engine: Any) -> list[list[str]]:
    groups = ds_engine.optimizer.fp16_groups
    return [[ds_engine.param_names[member] for member in members] for members in groups]


def _truncate(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 1)


def _garble(shard: Path) -> None:
    """Flip the lowest bit of a master weight."""
    data = shard.read_bytes()
    build.flip(shard, read_header(data, len(data)).entries["master/first.weight"].begin)
