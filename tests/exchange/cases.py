"""What the ranks of the tests in this folder do. Each function runs on every rank."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import engine
from engine.__main__ import main
from launcher import hf_model
from launcher.gpt import GPT
from tests.checkpoint import kinds
from tests.distributed import toy

SEQ_LEN = 16
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}


def toys(root: str) -> dict[str, Any]:
    """Run the cases that take a Toy: tied, frozen, with a buffer, in two param groups."""
    return {
        case.__name__: case(os.path.join(root, case.__name__))
        for case in (masters_come_back, other_precisions, other_engines, refused_directories)
    }


def hugging_face(root: str, configs: Mapping[str, Any]) -> dict[str, Any]:
    """Take each config's model out and in again."""
    return {
        name: out_and_in(os.path.join(root, name), document) for name, document in configs.items()
    }


def masters_come_back(directory: str) -> dict[str, Any]:
    """Export fp32, start another engine from it; both must train on alike."""
    first = toy.make_engine()
    toy.train(first, 1, 3)
    _save(first, directory, 3)
    out = _export(directory, "fp32", "--shard-size", "1KB")
    masters = _masters(first)
    second = _changed(toy.make_engine())
    assert _masters(second) != masters, "the target must differ before it takes the weights"
    identity = engine.initialize_from(second, out)
    # As the launcher does it: what comes before has gathered the small parameters on every rank.
    third = _changed(toy.make_engine())
    checkpointer = engine.attach(third, os.path.join(directory, "third"))
    assert checkpointer.resume("auto") is None
    engine.initialize_from(third, out)
    checkpointer.close()
    return {
        "masters": [masters, _masters(second)],
        "identity": sorted(identity["files"]),
        "trained": [_train(second), _train(third)],
        "training copies": [_whole(first), _whole_after_init(out)],
    }


def other_precisions(directory: str) -> dict[str, Any]:
    """An export in bf16 gives the training copies, and masters that are these very values."""
    first = toy.make_engine()
    toy.train(first, 1, 3)
    _save(first, directory, 3)
    out = _export(directory, "as-trained")
    second = _changed(toy.make_engine())
    engine.initialize_from(second, out)
    rounded = [flat.bfloat16().float() for flat in first.optimizer.fp32_partitioned_groups_flat]
    return {
        "weights": [_whole(first), _whole(second)],
        "masters": [_digest_masters(first, rounded), _masters(second)],
    }


def other_engines(directory: str) -> dict[str, Any]:
    """Start engines of other precision, or with their state elsewhere, from an export in fp32."""
    first = toy.make_engine()
    toy.train(first, 1, 3)
    _save(first, directory, 3)
    out = _export(directory, "fp32")
    found = {}
    offload = {"stage": 3, "sub_group_size": 120, "offload_optimizer": {"device": "cpu"}}
    for name, settings in {
        "fp32": {"bf16": {"enabled": False}},
        "optimizer on the CPU": {
            "zero_optimization": offload,
            "zero_force_ds_cpu_optimizer": False,
        },
        "parameters on the CPU": {
            "zero_optimization": {**offload, "offload_param": {"device": "cpu"}},
            "zero_force_ds_cpu_optimizer": False,
        },
    }.items():
        ds_engine = _changed(toy.make_engine(settings=settings))
        engine.initialize_from(ds_engine, out)
        weights = _whole(ds_engine)
        if name == "fp32":
            assert all(digest.startswith("torch.float32") for digest in weights.values())
        else:
            assert weights == _whole(first), name
        found[name] = [_masters(first), _masters(ds_engine)]
    return found


def refused_directories(directory: str) -> dict[str, str]:
    """Start from directories that do not fit; return what each of them gave on this rank."""
    source = toy.make_engine()
    _save(source, directory, 0)
    good = _export(directory, "fp32")
    tensors = load_file(os.path.join(good, "model.safetensors"))
    wrong = {
        "names": {
            **{n: t for n, t in tensors.items() if n not in ("first.bias", "seen")},
            "extra": torch.zeros(2),
        },
        "shape": {**tensors, "first.weight": torch.zeros(3, 3)},
        "dtype": {**tensors, "frozen": torch.zeros(9, dtype=torch.int64)},
        "tied": {**tensors, "tied.weight": tensors["head.weight"] + 1},
    }
    found = {}
    for name, changed in wrong.items():
        path = os.path.join(directory, name)
        if dist.get_rank() == 0:
            os.makedirs(path)
            save_file(changed, os.path.join(path, "model.safetensors"))
        dist.barrier()
        before = _masters(source)
        found[name] = _refusal(source, path)
        assert _masters(source) == before, "nothing may change before all has been checked"
    both = os.path.join(directory, "both")
    if dist.get_rank() == 0:
        os.makedirs(both)
        save_file(
            {**tensors, "tied.weight": tensors["head.weight"].clone()}, f"{both}/model.safetensors"
        )
    dist.barrier()
    engine.initialize_from(source, both)
    # One rank alone cannot see the files: all refuse.
    found["one rank"] = _refusal(source, good if dist.get_rank() == 0 else f"{good}.absent")
    return found


def out_and_in(directory: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Train, export, read with from_pretrained; start another engine from the export."""
    config_directory = Path(directory) / "config"
    if dist.get_rank() == 0:
        config_directory.mkdir(parents=True)
        (config_directory / "config.json").write_text(json.dumps(document))
        (config_directory / "tokenizer.json").write_text("{}")
    dist.barrier()
    first = _language_model(str(config_directory), seed=1)
    for step in range(3):
        loss = first(**_batch(step)).loss
        first.backward(loss)
        first.step()
    checkpoints = os.path.join(directory, "checkpoints")
    _save(first, checkpoints, 3, {"hugging_face": first.module.hugging_face})
    out = _export(checkpoints, "as-trained", "--shard-size", "20KB")
    exact = _export(checkpoints, "fp32")
    trained, (logits, loss) = _whole(first), _judged(first)
    report = _from_pretrained(out) if dist.get_rank() == 0 else None
    second = _language_model(str(config_directory), seed=2)
    assert _whole(second) != trained
    engine.initialize_from(second, out)
    third = _language_model(str(config_directory), seed=3)
    engine.initialize_from(third, exact)
    return {
        "report": report,
        "weights": [trained, _whole(second), _whole(third)],
        "logits": [logits, _judged(second)[0], _judged(third)[0]],
        "loss": loss,
        "masters": [_masters(first), _masters(third)],
        "out": out,
    }


def _from_pretrained(out: str) -> dict[str, Any]:
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    whole = {name: _digest(value) for name, value in model.named_parameters()}
    batch = _batch(99)
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits
    loss = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch["labels"].flatten()
    )
    return {
        "info": {name: sorted(map(str, found)) for name, found in info.items() if found},
        "weights": whole,
        "logits": _digest(logits),
        "loss": loss.item(),
        "dtype": str(model.dtype),
    }


def _language_model(path: str, seed: int) -> Any:
    torch.manual_seed(seed)
    config = {
        "train_batch_size": 2 * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "sub_group_size": 5000},
        "optimizer": ADAMW,
    }
    model = hf_model.causal_lm(path=path, deepspeed_config=config, seq_len=SEQ_LEN)
    ds_engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return ds_engine


def _batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (2, SEQ_LEN + 1), generator=generator)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def _judged(ds_engine: Any) -> tuple[str, float]:
    """Return the logits' digest, and the loss, of a batch."""
    ds_engine.eval()
    with torch.no_grad():
        output = ds_engine(**_batch(99))
    ds_engine.train()
    return _digest(output.logits), output.loss.item()


def _save(ds_engine: Any, directory: str, step: int, fingerprint: Any = None) -> None:
    checkpointer = engine.attach(ds_engine, directory, fingerprint=fingerprint)
    checkpointer.resume("never")
    assert checkpointer.save(step, sample_offset=0)
    assert checkpointer.close()


def _export(directory: str, dtype: str, *options: str) -> str:
    """Export on rank 0, for all."""
    out = os.path.join(directory, f"exported-{dtype}")
    if dist.get_rank() == 0:
        assert main(["export", directory, "--out", out, "--dtype", dtype, *options]) == 0
    dist.barrier()
    return out


def _refusal(ds_engine: Any, path: str) -> str:
    try:
        engine.initialize_from(ds_engine, path)
    except engine.ExchangeError as error:
        return str(error)
    raise AssertionError(f"{path} was not refused")


def _changed(ds_engine: Any) -> Any:
    """Change all of a Toy's weights and buffers, so that none of them is right by chance."""
    optimizer = ds_engine.optimizer
    for masters, copies in zip(
        optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True
    ):
        masters.data.add_(1)
        copies.data.copy_(masters.data)
    ds_engine.module.frozen.ds_tensor.data.add_(1)
    ds_engine.module.seen.add_(5)
    return ds_engine


def _train(ds_engine: Any) -> list[list[str]]:
    toy.seed_all(dist.get_rank())
    return toy.train(ds_engine, 1, 3)


def _whole_after_init(out: str) -> dict[str, str]:
    ds_engine = _changed(toy.make_engine())
    engine.initialize_from(ds_engine, out)
    return _whole(ds_engine)


def _whole(ds_engine: Any) -> dict[str, str]:
    """Return digests of all training copies and buffers, gathered."""
    module = ds_engine.module
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        found = {name: _digest(value.data) for name, value in module.named_parameters()}
    names = ds_engine._get_buffer_names()
    return found | {name: _digest(module.get_buffer(name)) for name in names}


def _masters(ds_engine: Any) -> str:
    return _digest_masters(ds_engine, ds_engine.optimizer.fp32_partitioned_groups_flat)


def _digest_masters(ds_engine: Any, flats: list[torch.Tensor]) -> str:
    """Return a digest of this rank's masters, without padding, which is uninitialised memory."""
    hasher = hashlib.blake2b(digest_size=8)
    for members, flat in zip(ds_engine.optimizer.fp16_groups, flats, strict=True):
        begin = 0
        for member in members:
            piece = -(-member.ds_numel // dist.get_world_size())
            valid = max(0, min(piece, member.ds_numel - dist.get_rank() * piece))
            hasher.update(flat.detach()[begin : begin + valid].numpy().tobytes())
            begin += piece
    return hasher.hexdigest()


def _digest(value: torch.Tensor) -> str:
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {hashlib.blake2b(data, digest_size=8).hexdigest()}"


def moves_over(root: str) -> dict[str, Any]:
    """Train and save with DeepSpeed alone; go on with its own load, and from an import of it."""
    return {
        "bf16": _moves_over(os.path.join(root, "bf16"), toy.make_engine, _train_toy, toy.digest),
        "fp16": _moves_over(os.path.join(root, "fp16"), kinds.make_engine, _train_kinds, _kinds),
    }


def saves_with_deepspeed(directory: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Train the launcher's GPT for 3 steps with DeepSpeed's own schedule and checkpoint."""
    torch.manual_seed(3)
    config = {
        "train_batch_size": 2 * dist.get_world_size(),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = GPT(**sizes)
    ds_engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    for step in range(3):
        loss = ds_engine(**_batch(step))
        ds_engine.backward(loss)
        ds_engine.step()
    ds_engine.save_checkpoint(directory)
    return _whole(ds_engine)


def resumes_elsewhere(directory: str) -> dict[str, Any]:
    """Resume, at this world size, what `moves_over` imported at another."""
    ds_engine = toy.make_engine()
    checkpointer = engine.attach(ds_engine, directory)
    resumed = checkpointer.resume("auto")
    assert checkpointer.close()
    return {"step": resumed.step, "weights": _whole(ds_engine)}


def _moves_over(directory: str, make: Any, train: Any, digest: Any) -> dict[str, Any]:
    source, root = os.path.join(directory, "deepspeed"), os.path.join(directory, "ours")
    first = make()
    train(first, 1, 3)
    first.save_checkpoint(source, client_state={"mine": (1, {2: "two"})})
    weights = _whole(first)
    second = make()
    second.load_checkpoint(source)
    there = [digest(second), train(second, 4, 6), digest(second)]
    if dist.get_rank() == 0:
        assert main(["import", source, "--out", root]) == 0
    dist.barrier()
    third = make()
    before = digest(third)
    checkpointer = engine.attach(third, root)
    resumed = checkpointer.resume("auto")
    here = [digest(third), train(third, 4, 6), digest(third)]
    assert checkpointer.save(6, sample_offset=24)
    assert checkpointer.close()
    assert here[0] != before, "the target must differ before it is restored"
    return {
        "there": there,
        "here": here,
        "weights": weights,
        "step": resumed.step,
        "sample offset": resumed.sample_offset,
        "client state": repr(resumed.client_state),
    }


def _train_toy(ds_engine: Any, first: int, last: int) -> list[list[str]]:
    toy.seed_all(dist.get_rank() + first)
    return toy.train(ds_engine, first, last)


def _train_kinds(ds_engine: Any, first: int, last: int) -> list[float]:
    toy.seed_all(dist.get_rank() + first)
    return kinds.train(ds_engine, last - first + 1)


def _kinds(ds_engine: Any) -> dict[str, str]:
    """What must come back, less the generators, which DeepSpeed does not store."""
    state = kinds.state_of(ds_engine)
    return {key: value for key, value in state.items() if key not in ("python", "numpy", "torch")}
