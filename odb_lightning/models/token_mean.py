"""A mean over targets, right for batches and ranks of unequal size."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenMean(Metric):
    """The mean over all targets of all updates on all ranks; NaN where there was no target.

    In float64, since float32 cannot count past 16 million. Not torchmetrics' MeanMetric: that leaves out NaN losses, and
    where told to keep them (`nan_strategy="disable"`, 1.9.0) it forgets the weights.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: int) -> None:
        """`total` is the sum over `count` targets."""
        self.total += total.double()
        self.count += count

    def compute(self) -> Tensor:
        return self.total / self.count
