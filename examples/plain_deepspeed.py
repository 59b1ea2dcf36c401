"""A DeepSpeed training loop of one's own that never loses a step: no launcher, no Hydra.

    torchrun --nproc-per-node 2 examples/plain_deepspeed.py --directory runs/plain

Give the same command again after a crash. Where the scheduler starts every rank and kills what is
left of a rank when it ends (srun, containers), let a keeper hold the rank until its writer is done:

    srun python -m launcher.keep -- python examples/plain_deepspeed.py --directory runs/plain
"""

import argparse
import json
import os
import random
from pathlib import Path

import deepspeed
import numpy
import torch
import torch.distributed as dist

import engine
from engine.format.manifest import Manifest
from engine.stream import Component, DocumentationText, Stream, StreamError, StreamLoader

SEQ_LEN, WIDTH, VOCABULARY = 64, 48, 257
MICRO_BATCH, GLOBAL_BATCH = 2, 8
SEED = 7


class TinyLanguageModel(torch.nn.Module):
    """Predicts the next byte from the last one; its forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = torch.nn.Linear(WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss for tokens of shape [batch, sequence]."""
        hidden = self.dropout(torch.relu(self.hidden(self.embedding(input_ids))))
        logits = self.head(hidden).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_engine() -> deepspeed.DeepSpeedEngine:
    """Return the DeepSpeed engine, as any script makes it."""
    accumulation = GLOBAL_BATCH // (MICRO_BATCH * dist.get_world_size())
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    }
    seed_all(SEED)  # the same weights on every rank
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = TinyLanguageModel()
    ds_engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    seed_all(SEED + 1 + dist.get_rank())  # dropout of its own on each
    return ds_engine


def seed_all(seed: int) -> None:
    """Seed every global generator; from here on the engine saves and restores them."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def main() -> None:
    """Train, from wherever the last attempt got to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", required=True, help="of the checkpoints and losses")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed starter; not used")
    arguments = parser.parse_args()

    deepspeed.init_distributed()
    ds_engine = make_engine()
    stream = Stream([Component("text", DocumentationText(seq_len=SEQ_LEN), 1.0)], seed=SEED)

    checkpointer = engine.attach(
        ds_engine,
        os.path.join(arguments.directory, "checkpoints"),
        engine.CheckpointOptions(keep_last=2),
        fingerprint=stream.fingerprint(),
    )
    resumed = checkpointer.resume("auto", accept=lambda manifest: require_same(manifest, stream))
    step = resumed.step if resumed else 0
    sample_offset = resumed.sample_offset if resumed else 0

    loader = StreamLoader(
        stream,
        micro_batch_size=MICRO_BATCH,
        dp_rank=dist.get_rank(),
        dp_world_size=dist.get_world_size(),
        sample_offset=sample_offset,
        global_batch_size=GLOBAL_BATCH,
    )
    while step < arguments.steps:
        losses = []
        for _ in range(ds_engine.gradient_accumulation_steps()):
            batch = next(loader)
            loss = ds_engine(batch["input_ids"], batch["labels"])
            ds_engine.backward(loss)
            ds_engine.step()
            losses.append(loss.item())
        step, sample_offset = step + 1, sample_offset + GLOBAL_BATCH
        write_losses(arguments.directory, step, losses)
        if step % arguments.save_every == 0 or step == arguments.steps:
            checkpointer.save(step, sample_offset=sample_offset, stream=stream.state(sample_offset))
    loader.close()
    checkpointer.close()  # returns when the last save is committed
    dist.barrier()
    dist.destroy_process_group()


def require_same(manifest: Manifest, stream: Stream) -> None:
    """Refuse a checkpoint of other data. Rank 0 asks, and all ranks hear of it."""
    try:
        stream.compare(manifest.fingerprint, manifest.sample_offset)
    except StreamError as error:
        raise engine.ResumeError(str(error)) from error


def write_losses(directory: str, step: int, losses: list[float]) -> None:
    """Append this rank's losses of a step, in full precision."""
    with open(Path(directory, f"losses_{dist.get_rank()}.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "losses": losses}) + "\n")


if __name__ == "__main__":
    main()
