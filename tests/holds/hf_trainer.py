"""A tiny GPT-2 under EverstepTrainer, one rank of it: for torchrun.

Writes the loss of every step to losses.jsonl, in full precision.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers

from engine.huggingface import EverstepTrainer

_DEEPSPEED = {
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Thirty samples, so that a run has several epochs, the last batch of each a short one."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(12).mul(index + 1).remainder(50)
        return {"input_ids": tokens, "labels": tokens}


class Losses(transformers.TrainerCallback):  # type: ignore[misc]
    """Writes what the Trainer logs at each step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            line = {"step": state.global_step, "losses": [repr(logs[k]) for k in sorted(logs)]}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def main(directory: Path, steps: int) -> None:
    """Train to the end, from wherever the last attempt got to."""
    # Compiling DeepSpeed's shared-memory op takes a compiler; gloo does without it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    arguments = transformers.TrainingArguments(
        output_dir=str(directory / "trainer"),
        use_cpu=True,
        ddp_backend="gloo",
        deepspeed=_DEEPSPEED,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        warmup_steps=5,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=5,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=12,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.set_seed(arguments.seed)  # the Trainer seeds when it is made: too late for weights
    trainer = EverstepTrainer(
        str(directory / "checkpoints"),
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Numbers(),
        callbacks=[Losses(directory / "losses_0.jsonl")],
    )
    trainer.train()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    main(**vars(parser.parse_args()))
