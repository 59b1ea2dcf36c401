"""A data set that is soon used up, and one that cannot be read."""

import torch


class Few:
    """Ten samples of one token each, for the tiny model."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((32,), index)
        return {"input_ids": tokens, "labels": tokens}


class Unreadable(Few):
    """Its samples are on a host that is gone."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        raise OSError("no such host")
