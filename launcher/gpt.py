"""A small decoder-only transformer (GPT): the default model.

It owns the network and its loss, nothing of training. Every weight is initialised by the submodule
that holds it, inside that submodule's ``__init__``: under ``deepspeed.zero.Init`` a parameter is
whole only until then, and is a partition afterwards, so that a later ``apply(init)`` would touch
empty tensors. There are no buffers, so nothing stays in float32 when the model is built in bf16.

Shapes: B sequences, T tokens, H heads, D features per head, C = H D features, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

INIT_STD = 0.02


class Linear(nn.Linear):  # type: ignore[misc]  # torch is untyped here
    """A linear layer with normal weights and a zero bias."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, std: float = INIT_STD
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        nn.init.normal_(self.weight, std=std)
        if bias:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):  # type: ignore[misc]
    """An embedding with normal weights."""

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        nn.init.normal_(self.weight, std=INIT_STD)


class CausalSelfAttention(nn.Module):  # type: ignore[misc]
    """Multi-head attention of each token to itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = Linear(width, 3 * width)
        self.projection = Linear(width, width, std=residual_std)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[B, T, C]`` to ``[B, T, C]``."""
        batch, tokens, width = hidden.shape
        # [B, T, 3 C] -> 3 of [B, H, T, D]
        query, key, value = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(hidden).split(width, dim=-1)
        )
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        # [B, H, T, D] -> [B, T, C]
        return self.projection(attended.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):  # type: ignore[misc]
    """The feed-forward half of a block, four times as wide inside."""

    def __init__(self, width: int, residual_std: float) -> None:
        super().__init__()
        self.expansion = Linear(width, 4 * width)
        self.projection = Linear(4 * width, width, std=residual_std)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[B, T, C]`` to ``[B, T, C]``."""
        return self.projection(F.gelu(self.expansion(hidden)))


class Block(nn.Module):  # type: ignore[misc]
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, width: int, heads: int, dropout: float, residual_std: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads, dropout, residual_std)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[B, T, C]`` to ``[B, T, C]``."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))


class GPT(nn.Module):  # type: ignore[misc]
    """Predict each next token.

    Args:
        vocab_size: number of token ids (``V``).
        seq_len: the longest sequence.
        layers, heads, width: blocks, attention heads per block, features (``C``).
        dropout: probability, in the embedding, the attention and both residual branches.
        tie_weights: let ``lm_head`` share ``token_embedding``'s weight.

    Raises:
        ValueError: a size is not positive, the heads do not divide the width, or dropout is not
            in [0, 1).
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float = 0.0,
        tie_weights: bool = False,
    ) -> None:
        super().__init__()
        _require_positive(
            vocab_size=vocab_size, seq_len=seq_len, layers=layers, heads=heads, width=width
        )
        if width % heads:
            raise ValueError(f"model.width is {width}, wanted a multiple of model.heads = {heads}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"model.dropout is {dropout}, wanted 0 or more and less than 1")
        self.seq_len = seq_len
        # Each block adds to the residual stream twice; this keeps its variance at that of one
        # addition at any depth (GPT-2, section 2.3).
        residual_std = INIT_STD / (2 * layers) ** 0.5
        self.token_embedding = Embedding(vocab_size, width)
        self.position_embedding = Embedding(seq_len, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, dropout, residual_std) for _ in range(layers)
        )
        self.final_norm = nn.LayerNorm(width)
        self.lm_head = Linear(width, vocab_size, bias=False)
        if tie_weights:
            self.lm_head.weight = self.token_embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy, a float32 scalar.

        Args:
            input_ids: int64 ``[B, T]``, T at most `seq_len`.
            labels: int64 ``[B, T]``; ``labels[:, t]`` is the token after ``input_ids[:, t]`` (they
                are not shifted here), or -100 where there is nothing to predict.
        """
        logits = self.logits(input_ids)
        # In float32: a sum over the vocabulary in bf16 loses what tells good tokens apart.
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return next-token scores, ``[B, T, V]`` in the model's dtype, for int64 ``[B, T]``."""
        tokens = input_ids.shape[1]
        if tokens > self.seq_len:
            raise ValueError(f"sequences have {tokens} tokens, wanted at most {self.seq_len}")
        positions = torch.arange(tokens, device=input_ids.device)
        hidden = self.dropout(self.token_embedding(input_ids) + self.position_embedding(positions))
        for block in self.blocks:
            hidden = block(hidden)
        return self.lm_head(self.final_norm(hidden))


def _require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"model.{name} is {size}, wanted 1 or more")
