"""Going back in a process that has trained on: what the ranks of test_going_back.py do."""

import os
from pathlib import Path
from typing import Any

import torch

import engine
from tests.checkpoint.cases import attach
from tests.distributed import toy


def goes_back(root: str) -> dict[str, Any]:
    """Spoil the state behind a checkpoint, and resume from that with the same DeepSpeed engine."""
    directory = os.path.join(root, "checkpoints")
    ds_engine = toy.make_engine()
    checkpointer, _ = attach(ds_engine, directory, keep_last=5)
    checkpointer.resume("auto")
    whole = toy.train(ds_engine, 1, 2)
    assert checkpointer.save(2, sample_offset=8)
    whole += toy.train(ds_engine, 3, 4)
    assert checkpointer.save(4, sample_offset=16)
    assert checkpointer.close()
    for tensor in toy.live_tensors(ds_engine).values():
        tensor.data.fill_(torch.nan)
    toy.train(ds_engine, 5, 5)
    assert ds_engine.module.head.weight.isnan().all(), "small parameters are whole after a step"

    checkpointer, events = attach(ds_engine, directory)
    refused = None
    try:
        checkpointer.resume("auto", why_not=lambda manifest: "they are all bad")
    except engine.NothingToResumeError as error:
        refused = str(error)
    resumed = checkpointer.resume(
        "auto", why_not=lambda manifest: "it is bad" if manifest.step > 2 else ""
    )
    images = Path("/proc/self/maps").read_text().count("memfd:everstep-image")
    again = toy.train(ds_engine, resumed.step + 1, 4)
    assert checkpointer.save(4, sample_offset=16)
    assert checkpointer.close()
    return {
        "refused": refused,
        "whole": whole,
        "again": again,
        "events": events,
        "images": images,
    }
