"""Means over targets, right for batches and ranks of unequal size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric


class TokenMean(Metric):
    """The mean over all targets of all updates on all ranks; NaN where there was no target.

    In float64 whatever the module's type, since float32 cannot count past 16 million and bfloat16 not past 256. Not
    torchmetrics' MeanMetric: that leaves out NaN losses, and where told to keep them (`nan_strategy="disable"`, 1.9.0) it
    forgets the weights.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        # `module.to(torch.bfloat16)`, which Lightning's "bf16-true" calls, would change the type of states as well.
        return super()._apply(lambda state: state.to(fn(state).device), *args, **kwargs)

    def update(self, total: Tensor, count: int) -> None:
        """`total` is the sum over `count` targets."""
        self.total += total.double()
        self.count += count

    def compute(self) -> Tensor:
        return self.total / self.count


class TokenPerplexity(TokenMean):
    """The exponential of the mean: perplexity, if `total` is the sum of cross entropies."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class TokenMetrics(nn.Module):
    """Mean loss, perplexity and accuracy over all targets of all updates on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = TokenMean()
        self.perplexity = TokenPerplexity()
        self.token_accuracy = TokenMean()

    def update(self, losses: Tensor, hits: Tensor) -> None:
        """The loss of each target (n,), and whether the likeliest token is the target (n,)."""
        total, count = losses.double().sum(), losses.numel()
        self.loss.update(total, count)
        self.perplexity.update(total, count)
        self.token_accuracy.update(hits.sum(), count)
