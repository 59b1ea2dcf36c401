"""The default model with its positions frozen."""

from typing import Any

from launcher.gpt import GPT


class FrozenGPT(GPT):
    """A GPT of which the position embedding is not trained."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.get_parameter("position_embedding.weight").requires_grad_(False)
