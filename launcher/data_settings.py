"""The settings of the data: components, their weights, and what is left out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launcher.errors import ConfigError
from launcher.schema import at_least, require


@dataclass(frozen=True)
class StageSettings:
    """Weights of the components from one sample on."""

    from_sample: int
    """The first global index that is drawn with these weights."""
    weights: Mapping[str, float]
    """By component; one that is not named keeps its weight."""

    def __post_init__(self) -> None:
        at_least("data.stages: from_sample", self.from_sample, 0)
        for name, weight in self.weights.items():
            at_least(f"data.stages: the weight of {name}", weight, 0)


@dataclass(frozen=True)
class DataSettings:
    """The `data` section."""

    components: Mapping[str, Mapping[str, Any]]
    """The data sets, by names of your own: `_target_` (any map-style data set), `weight` (its share
    of the samples), `epochs` (how often each of its samples may be drawn; null or left out for no
    limit), and the data set's arguments."""
    seq_len: int
    """Tokens per sample, in the data sets and models that come with Everstep."""
    workers: int
    """Loader processes per rank; 0 loads in the training process. The order of the samples does
    not depend on them."""
    prefetch_batches: int
    """Batches that each worker keeps ready."""
    accept_changed: bool
    """Resume although the data differ from those the checkpoint was made with; it is recorded."""
    stages: tuple[StageSettings, ...] = ()
    """Other weights from given samples on. Later ones may be added as the run goes on, ahead of
    where it stands."""
    skip: tuple[tuple[int, int], ...] = ()
    """Ranges [first, end] of global indices that are left out, the end not included. Later ones
    may be added as the run goes on."""
    when_exhausted: Literal["redistribute", "end"] = "redistribute"
    """What happens when a component has had its epochs: `redistribute` gives its share to the
    others, `end` ends the run."""

    def __post_init__(self) -> None:
        at_least("data.seq_len", self.seq_len, 1)
        at_least("data.workers", self.workers, 0)
        at_least("data.prefetch_batches", self.prefetch_batches, 1)
        require(bool(self.components), "data.components is empty: name at least one data set.")
        for name, component in self.components.items():
            _check_component(f"data.components.{name}", component)


def _check_component(path: str, component: Mapping[str, Any]) -> None:
    if not isinstance(component.get("_target_"), str):
        raise ConfigError(f"{path}._target_ is not set: name the class of the data set.")
    for key, value in component.items():
        if value == "???":
            raise ConfigError(f"{path}.{key} is not set: give it, {path}.{key}=...")
    weight = component.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight < 0:
        raise ConfigError(f"{path}.weight={weight!r}: wanted a number, 0 or above.")
    epochs = component.get("epochs")
    if epochs is not None and (type(epochs) is not int or epochs < 1):
        raise ConfigError(
            f"{path}.epochs={epochs!r}: wanted a whole number of 1 or more, or null for no limit."
        )
    if not isinstance(component.get("path", ""), str):
        raise ConfigError(f"{path}.path={component['path']!r}: wanted text.")
