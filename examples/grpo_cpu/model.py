"""A transformer in the architecture of Llama, and its weights in files.

The policy of this example has 0.16 M parameters. A test runs SmolLM2-135M in the same class.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    vocabulary: int
    width: int = 72
    layers: int = 2
    heads: int = 3
    kv_heads: int = 3
    hidden: int = 180
    """Width between the matrices of the feed-forward part."""
    rope_base: float = 10_000.0
    epsilon: float = 1e-5


Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer: (batch, kv_heads, tokens, head width)."""


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, size = shape, shape.width // shape.heads
        self.norm1 = nn.RMSNorm(shape.width, shape.epsilon)
        self.norm2 = nn.RMSNorm(shape.width, shape.epsilon)
        self.query = nn.Linear(shape.width, shape.heads * size, bias=False)
        self.key = nn.Linear(shape.width, shape.kv_heads * size, bias=False)
        self.value = nn.Linear(shape.width, shape.kv_heads * size, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(
        self, x: Tensor, angles: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the next hidden states, and all keys and values."""
        batch, tokens, _ = x.shape
        y = self.norm1(x)

        def split(z: Tensor) -> Tensor:
            return z.view(batch, tokens, -1, self.shape.width // self.shape.heads).transpose(1, 2)

        q, k = rotate(split(self.query(y)), angles), rotate(split(self.key(y)), angles)
        v = split(self.value(y))
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        grouped = self.shape.kv_heads != self.shape.heads
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, -1))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y)), (k, v)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary positions to neighbouring pairs (arXiv 2104.09864, as in GGUF files)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Transformer(nn.Module):
    """A decoder. Its output matrix is its embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=shape.width**-0.5)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, shape.epsilon)

    def forward(self, ids: Tensor, real: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        """Return the logits that follow each of the last tokens, and the cache of all tokens.

        Args:
            ids: (batch, new tokens).
            real: (batch, all tokens), False for padding, which nothing attends to and which takes
                no position.
            past: the cache of the tokens before.
        """
        new, size = ids.shape[1], self.shape.width // self.shape.heads
        places = (real.long().cumsum(1) - 1).clamp(min=0)[:, -new:]
        speeds = self.shape.rope_base ** (-torch.arange(0, size, 2) / size)
        angles = (places[:, None, :, None] * speeds).float()
        everything = real.shape[1]
        before = torch.ones(new, everything, dtype=torch.bool).tril(everything - new)
        # A padded row attends to itself: a softmax over nothing is not a number.
        itself = torch.eye(everything, dtype=torch.bool)[-new:]
        mask = (real[:, None, None, :] & before) | itself
        x, cache = self.embedding(ids), []
        for place, block in enumerate(self.blocks):
            x, kept = block(x, angles, mask, past[place] if past else None)
            cache.append(kept)
        return functional.linear(self.norm(x), self.embedding.weight), cache


def logprobs_of(model: Transformer, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return the logprob of each token after the ones before it: (sequences, longest), 0 for the
    first token and for padding on the right."""
    longest = max(map(len, sequences))
    ids = torch.tensor([[*one, *[0] * (longest - len(one))] for one in sequences])
    real = torch.arange(longest) < torch.tensor([len(one) for one in sequences])[:, None]
    logits, _ = model(ids[:, :-1], real[:, :-1])
    scores = -functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return functional.pad(scores * real[:, 1:], (1, 0))


def save(model: Transformer, path: Path) -> None:
    """Write weights for another process: the file is complete once it has its name."""
    part = path.with_name(f".{path.name}.part")
    torch.save({"shape": asdict(model.shape), "weights": model.state_dict()}, part)
    os.replace(part, path)


def load(path: Path) -> Transformer:
    """Read weights."""
    file: Mapping[str, Any] = torch.load(path, weights_only=True)
    return from_weights(Shape(**file["shape"]), file["weights"])


def from_weights(shape: Shape, weights: Mapping[str, Tensor]) -> Transformer:
    """Return a model with these weights."""
    with torch.device("meta"):  # no time is spent on first values
        model = Transformer(shape)
    model.load_state_dict(weights, assign=True)
    return model.eval()
