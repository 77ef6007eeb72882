"""Parameters that an update does not use, under DistributedDataParallel with `find_unused_parameters`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odb_lightning.batch import StepInfo
from odb_lightning.strategies.windows import PlansWindows


class LeavesOutUnused(PlansWindows):
    """A parameter that nothing but stand-ins used in an update has no gradient, as where no rank was idle: not one of zero, by
    which momentum and weight decay would move it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._window: tuple[int, int] | None = None
        self._used: set[int] = set()
        """Parameters whose gradient is to stay, by their place: those that this rank's batches of the window have used, and
        those that had one before."""
        self._has_idle_rank = False
        """Whether a rank was idle in the window, this one or another."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self._window = None

    @contextmanager
    def _leaving_out_unused(self, info: StepInfo) -> Iterator[None]:
        """Around a backward. A collective after the last of a window in which a rank was idle."""
        model = self.model
        if not isinstance(model, DistributedDataParallel) or not model.find_unused_parameters:
            yield
            return
        parameters = list(model.parameters())
        window = self._trainer.current_epoch, info.step // info.accumulate
        if window != self._window:
            had_gradient = {place for place, parameter in enumerate(parameters) if parameter.grad is not None}
            self._window, self._used, self._has_idle_rank = window, had_gradient, False
        self._has_idle_rank |= info.num_active_ranks < info.world_size
        with ExitStack() as stack:
            if not info.is_idle:
                for place, parameter in enumerate(parameters):
                    if parameter.requires_grad:
                        handle = parameter.register_post_accumulate_grad_hook(lambda _, place=place: self._used.add(place))
                        stack.callback(handle.remove)
            yield
        if self._has_idle_rank and self.ends_window:
            self._leave_out(model, parameters)

    def _leave_out(self, model: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
        is_used = torch.tensor(
            [place in self._used for place in range(len(parameters))], dtype=torch.uint8, device=self.root_device
        )
        dist.all_reduce(is_used, dist.ReduceOp.MAX, group=model.process_group)
        for parameter, is_kept in zip(parameters, is_used.tolist(), strict=True):
            if not is_kept:
                parameter.grad = None
