"""How many targets the mean loss of a batch is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

IGNORE_INDEX = -100
"""The label of a position without a target."""

NumSupervised = Literal["causal", "unshifted"] | Callable[[Any], float]
_RULES = ("causal", "unshifted")


class _Default(str):
    """Tells the default from the same rule named by the user, who then knows what it counts."""


DEFAULT_RULE: Any = _Default("causal")


def check_rule(rule: Any) -> None:
    """Raises ValueError for a `num_supervised_fn` that is neither a known rule nor callable."""
    if not callable(rule) and rule not in _RULES:
        raise ValueError(f"num_supervised_fn={rule!r} is unknown: choose 'causal', 'unshifted' or a function of the batch")


def labels_of(data: Any) -> Any:
    """`data["labels"]` or `data.labels`, or None."""
    if isinstance(data, Mapping):
        return data.get("labels")
    return getattr(data, "labels", None)


class TargetCounter:
    """Counts the targets of collated batches by `num_supervised_fn`, and gathers warnings for the training process.

    `"causal"`: of two-dimensional labels those of `labels[:, 1:]` that are not -100, as the loss of a causal model shifts
    them; `"unshifted"`: all that are not -100. One-dimensional labels count all but -100; without labels samples count.
    """

    def __init__(self, rule: Any) -> None:
        self._rule = rule
        self._is_default = isinstance(rule, _Default)
        self._warned: set[str] = set()
        self._warnings: list[str] = []

    def __call__(self, data: Any, num_samples: int) -> int | float:
        """The number of targets in `data`. Raises TypeError or ValueError for a result that is no count."""
        if callable(self._rule):
            count = float(self._rule(data))
            if not math.isfinite(count) or count < 0:
                raise ValueError(f"num_supervised_fn returned {count}; it has to return a finite number, 0 or more")
            return int(count) if count.is_integer() else count
        labels = labels_of(data)
        if labels is None:
            if self._is_default and not isinstance(data, Mapping):
                self.warn_once(
                    "no labels",
                    f"no labels were found in a batch of type {type(data).__name__}, so each sample counts as one target "
                    "of the loss; pass num_supervised_fn=<function of the batch> to declare what the mean loss is over",
                )
            return num_samples
        labels = torch.as_tensor(np.asarray(labels) if isinstance(labels, list) else labels)
        if labels.dim() == 2 and self._rule == "causal":
            if self._is_default and labels.numel() and bool((labels[:, 0] != IGNORE_INDEX).all()):
                self.warn_once(
                    "column 0",
                    "the labels in column 0 are supervised in every sample of a batch. The default num_supervised_fn='causal' "
                    "leaves that column out, as causal models shift labels. If yours are shifted already (or the model is "
                    "an encoder-decoder or a masked one) pass num_supervised_fn='unshifted', else 'causal', to say so",
                )
            labels = labels[:, 1:]
        return int(torch.count_nonzero(labels != IGNORE_INDEX))

    def of_batch(self, data: Any, num_samples: int) -> int | float:
        """The same for a batch that goes into the loss; says once that there is one without targets."""
        count = self(data, num_samples)
        if not count:
            self.warn_once(
                "no targets",
                f"a batch of {num_samples} samples has no target (num_supervised_fn counts none): it adds nothing to the loss, "
                "and an update of such batches alone is left out; more are only counted",
            )
        return count

    def warn_once(self, kind: str, text: str) -> None:
        """Keeps the first warning of a kind for the training process to show."""
        if kind not in self._warned:
            self._warned.add(kind)
            self._warnings.append(text)

    def take_warnings(self) -> list[str]:
        """The warnings not taken yet."""
        taken, self._warnings = self._warnings, []
        return taken
