"""Hugging Face's Trainer with this engine's checkpoints instead of its own.

    from engine.huggingface import EverstepTrainer

    trainer = EverstepTrainer("checkpoints", model=model, args=arguments, train_dataset=dataset)
    trainer.train()                         # continues where the last attempt got to

It needs DeepSpeed ZeRO-3 in the arguments, and is a subclass because a callback comes too late: the
Trainer loads before it calls the first one. What it overrides is private, so the version of
transformers is pinned and a test runs it. Extra `hf`.

What comes back, besides all that the engine holds: the Trainer's state (step, epoch, log), its
scheduler and its callbacks' states. The Trainer finds its place in the data by itself: it counts
batches and goes past those that were done, which is exact at the same number of ranks, batch sizes
and data only, and takes the longer the further it got. docs/own-loop.md has the limits.
"""

import dataclasses
from typing import Any

from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState

import engine
from engine.checkpoint import rng

_REFUSED = {
    "auto_find_batch_size": "trains again from the start of the process with another batch size",
    "ignore_data_skip": "uses samples again that were used before the stop",
    "load_best_model_at_end": "loads one of the Trainer's own checkpoints",
    "push_to_hub": "uploads the Trainer's own checkpoints",
    "save_only_model": "leaves out what is needed to go on",
    "save_total_limit": "is CheckpointOptions(keep_last=...) here",
}
_RESUMED = "everstep"  # where the Trainer wants a path; it only asks whether there is one


class EverstepTrainer(Trainer):  # type: ignore[misc]  # transformers is untyped here
    """A Trainer that saves and resumes through `engine.attach`. Training on DeepSpeed ZeRO-3 only.

    Args:
        directory: of the checkpoints, shared by all ranks.
        options: of `engine.attach`.
        resume: what to continue from; see `Checkpointer.resume`.
        arguments: the Trainer's own.

    Raises:
        RefusedError: a training argument that cannot be held, which the message names.
    """

    def __init__(
        self,
        directory: str,
        *,
        options: engine.CheckpointOptions | None = None,
        resume: str = "auto",
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._directory = directory
        self._options = options or engine.CheckpointOptions()
        self._resume = resume
        self._checkpointer: engine.Checkpointer | None = None
        self._plan: tuple[Any, ...] = ()
        self._resumed_at: tuple[int, int] | None = None
        self._generators: dict[str, Any] = {}
        if not self.is_deepspeed_enabled:
            raise engine.RefusedError(
                "EverstepTrainer trains with DeepSpeed ZeRO-3: set TrainingArguments(deepspeed=...)"
            )
        for name, reason in _REFUSED.items():
            value = getattr(self.args, name)
            if value:
                raise engine.RefusedError(f"TrainingArguments({name}={value}) {reason}: remove it")

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """Train, from the checkpoint that `resume` finds. Collective; as `Trainer.train`."""
        if arguments or keywords.get("resume_from_checkpoint") not in (None, False):
            raise engine.RefusedError(
                "EverstepTrainer finds what to resume by itself: give its constructor resume=..."
            )
        return super().train(**keywords)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> Any:
        """Keep what is needed to do this again, when the checkpoint is known."""
        self._plan = (num_update_steps_per_epoch, max_steps, num_train_epochs, trial)
        return super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, None, trial
        )

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        """Have DeepSpeed's engine made, and resume it."""
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self._checkpointer = engine.attach(self.deepspeed, self._directory, self._options)
        resumed = self._checkpointer.resume(self._resume)
        if resumed is not None:
            self._take_up(resumed)
        return prepared

    def _take_up(self, resumed: engine.ResumedState) -> None:
        """Set the Trainer to where the checkpoint was saved."""
        steps_per_epoch, *references = self._plan
        self._generators = rng.capture()
        self.state = TrainerState(**resumed.client_state["trainer"])
        self._load_callback_state()
        self.state.init_training_references(self, *references)
        epochs, steps = divmod(self.state.global_step, steps_per_epoch)
        self._resumed_at = epochs, steps * self.args.gradient_accumulation_steps
        if resumed.client_state["scheduler"] is not None:
            self.lr_scheduler.load_state_dict(resumed.client_state["scheduler"])

    def _run_epoch(self, **arguments: Any) -> None:
        """Go through an epoch, or through what the checkpoint has left of it."""
        if self._resumed_at is not None:
            epochs, micro_steps = self._resumed_at
            if arguments["epoch"] < epochs:
                return
            arguments |= {
                "resume_from_checkpoint": _RESUMED,
                "epochs_trained": epochs,
                "steps_trained_in_current_epoch": micro_steps,
            }
        super()._run_epoch(**arguments)

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Restore the generators: going past batches has moved them."""
        rng.restore(self._generators)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save through the engine, and nothing else. Collective; returns when staged."""
        assert self._checkpointer is not None, "training has begun"
        self.store_flos()
        exportable = (*self.callback_handler.callbacks, self.control)
        self.state.stateful_callbacks = {}
        for callback in exportable:
            if isinstance(callback, ExportableState):
                states = self.state.stateful_callbacks.setdefault(type(callback).__name__, [])
                states.append(callback.state())
        step = self.state.global_step
        # DeepSpeed's own scheduler is saved with its engine.
        own = self.deepspeed.lr_scheduler is None and self.lr_scheduler is not None
        self._checkpointer.save(
            step,
            sample_offset=step * self.deepspeed.train_batch_size(),
            client_state={
                "trainer": dataclasses.asdict(self.state),
                "scheduler": self.lr_scheduler.state_dict() if own else None,
            },
        )

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """Wait until the last save is committed."""
        output = super()._finalize_training(trial, num_train_samples, start_time)
        assert self._checkpointer is not None, "training has begun"
        self._checkpointer.close()
        return output
