"""Which parts of a module its backwards use, under DeepSpeed (0.19), where they have to be the same.

On all ranks: it adds gradients up by their order, so that those of one part may go to another. And in all micro-batches of a
window, with the optimizer offloaded and under ZeRO 1, unless overlap_comm=False: it loses what the last of them does not use
(`tests/multiprocess/test_loss_cases.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn


class PartsUsed:
    """The parameters that the backwards of a window use."""

    def __init__(self, module: nn.Module, device: torch.device, is_alike_in_window: bool) -> None:
        self.of_window: list[bytes] = []
        """For each backward so far a byte per parameter: 1 if it was used."""
        self._now = bytearray()
        self._device = device
        self._is_alike_in_window = is_alike_in_window
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._names = list(trained)
        self._hooks = [parameter.register_hook(partial(self._note, place)) for place, parameter in enumerate(trained.values())]

    def _note(self, place: int, _: Tensor) -> None:
        if self._now:
            self._now[place] = 1

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around a backward."""
        self._now = bytearray(len(self._names))
        try:
            yield
            self.of_window.append(bytes(self._now))
        finally:
            self._now = bytearray()

    def check(self) -> None:
        """At the end of a window: a collective. Raises RuntimeError, on all ranks alike."""
        uses = torch.frombuffer(bytearray(b"".join(self.of_window)), dtype=torch.uint8).view(len(self.of_window), -1)
        digest = int.from_bytes(hashlib.blake2b(b"".join(self.of_window), digest_size=7).digest(), "big")
        self.of_window.clear()
        varies = (uses != uses[0]).any(0) & self._is_alike_in_window
        has_variation, largest, smallest = self._largest(torch.tensor([int(varies.any()), digest, -digest])).tolist()
        if has_variation:
            raise RuntimeError(
                f"some micro-batches of an accumulation window use {self._some(varies)}, and others do not: DeepSpeed may lose "
                "gradients then, under ZeRO 1 and with the optimizer offloaded. Run all parts of the module in every batch (a "
                "part without input on a blank one, its output times zero); or take ZeRO 2 or 3 without offload, ZeRO 1 with "
                "overlap_comm=False, or accumulate_grad_batches=1"
            )
        if largest != -smallest:
            differs = (self._largest(uses) + self._largest(1 - uses) > 1).any(0).cpu()
            raise RuntimeError(
                f"some ranks use {self._some(differs)} in a micro-batch in which others do not: DeepSpeed may add up the "
                "gradients of different parts then. Run all parts of the module on each rank in every batch (a part without "
                "input on a blank one, its output times zero)"
            )

    def _largest(self, values: Tensor) -> Tensor:
        """Over the ranks."""
        values = values.to(self._device, copy=True)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def _some(self, places: Tensor) -> str:
        names = [self._names[place] for place in places.nonzero().flatten().tolist()]
        return ", ".join(names[:3] or ["other parts"]) + (", ..." if len(names) > 3 else "")

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
