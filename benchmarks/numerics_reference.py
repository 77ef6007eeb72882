"""The network of the numerics page, its samples, and the gradient that an update should have. Needs torch alone, for the peers'
environment.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

IGNORE_INDEX = -100
WIDTH, HEADS = 32, 2
Sample = dict[str, Tensor]


@dataclass
class Samples(torch.utils.data.Dataset[Sample]):
    """`input_ids` and `labels` of each, one-dimensional; ids are below `vocabulary`."""

    vocabulary: int
    items: list[Sample]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Sample:
        return dict(self.items[index])

    @property
    def lengths(self) -> list[int]:
        return [len(item["input_ids"]) for item in self.items]

    @property
    def supervised_share(self) -> float:
        return sum(map(num_targets, self.items)) / sum(self.lengths)

    def unmasked(self) -> Samples:
        """The same with every token a target, the prompts', too."""
        return Samples(self.vocabulary, [{"input_ids": item["input_ids"], "labels": item["input_ids"]} for item in self.items])

    def save(self, file: Path) -> None:
        torch.save({"vocabulary": self.vocabulary, "items": self.items}, file)

    @classmethod
    def load(cls, file: Path) -> Samples:
        return cls(**torch.load(file))


def with_a_small_vocabulary(items: Iterable[Sample]) -> Samples:
    """With the ids that occur numbered from 1; 0 is for padding."""
    items = list(items)
    known = torch.unique(torch.cat([item["input_ids"] for item in items]))

    def numbered(ids: Tensor) -> Tensor:
        return torch.searchsorted(known, ids) + 1

    renamed = []
    for item in items:
        ids = numbered(item["input_ids"])
        renamed.append({"input_ids": ids, "labels": torch.where(item["labels"] == IGNORE_INDEX, IGNORE_INDEX, ids)})
    return Samples(len(known) + 1, renamed)


def num_targets(batch: Sample) -> int:
    """Of a sample or a batch: a causal model has none in column 0."""
    return int((batch["labels"][..., 1:] != IGNORE_INDEX).sum())


def pad(samples: Sequence[Sample]) -> Sample:
    """On the right; no mask, since a causal model looks to the left only."""
    return {
        key: nn.utils.rnn.pad_sequence([sample[key] for sample in samples], batch_first=True, padding_value=value)
        for key, value in (("input_ids", 0), ("labels", IGNORE_INDEX))
    }


class Network(nn.Module):
    """A causal transformer of one block; the same weights wherever it is made."""

    def __init__(self, vocabulary: int, longest: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tokens = nn.Embedding(vocabulary, WIDTH)
            self.places = nn.Embedding(longest, WIDTH)
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
            self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
            self.mix = nn.Linear(WIDTH, WIDTH)
            self.wide = nn.Linear(WIDTH, 4 * WIDTH)
            self.narrow = nn.Linear(4 * WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Of shape (samples, length, width); the head is for `loss_sum`."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        parts = self.queries_keys_values(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.mix(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(-2))
        x = x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))
        return self.norms[2](x)  # type: ignore[no-any-return]

    def loss_sum(self, batch: Sample) -> Tensor:
        """Cross entropy over the targets, summed."""
        targets = batch["labels"][:, 1:]
        is_target = targets != IGNORE_INDEX
        return cross_entropy(self.head(self(batch["input_ids"])[:, :-1][is_target]), targets[is_target], reduction="sum")

    def mean_loss(self, batch: Sample) -> Tensor:
        """Over the batch's targets, as modules return it; zero where there are none."""
        return self.loss_sum(batch) / max(num_targets(batch), 1)


def network_for(samples: Samples) -> Network:
    return Network(samples.vocabulary, max(samples.lengths))


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """In float64."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors if tensor is not None])


class Reference:
    """Gradients in float64, one sample at a time, without padding, in this process alone."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.network = network_for(samples).double()

    def backward(self, sample_ids: Iterable[Hashable]) -> float:
        """Leaves the gradient of the mean over all targets of these samples in `network`, and returns that mean."""
        self.network.zero_grad(set_to_none=False)
        batches = [pad([self.samples[int(index)]]) for index in sample_ids]  # type: ignore[call-overload]
        total = max(sum(map(num_targets, batches)), 1)
        return sum(self._backward(batch, total) for batch in batches if num_targets(batch))

    def _backward(self, batch: Sample, total: int) -> float:
        loss = self.network.loss_sum(batch) / total
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def error(self, network: nn.Module, sample_ids: Iterable[Hashable]) -> float | None:
        """Of `network`'s gradients at its present weights: the norm of the difference over that of the right ones. None where
        there is no target, and nothing to compare with."""
        copied = copy.deepcopy(network).double()
        self.network.load_state_dict(copied.state_dict())
        self.backward(sample_ids)
        right = flat(parameter.grad for parameter in self.network.parameters())
        if not right.any():
            return None
        return float((flat(parameter.grad for parameter in network.parameters()) - right).norm() / right.norm())
