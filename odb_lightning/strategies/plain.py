"""One device, and DDP."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from odb_lightning.strategies.steps import ODBStrategyMixin


class ODBSingleDeviceStrategy(ODBStrategyMixin, SingleDeviceStrategy):
    """One device: by default the one that the trainer picks."""

    strategy_name = "odb"

    def __init__(self, device: torch.device | str | None = None, **kwargs: Any) -> None:
        super().__init__(device="cpu" if device is None else device, **kwargs)
        self._has_device = device is not None

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The one device; empty until it is known."""
        return [self._root_device] if self._has_device else []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        # Lightning hands the devices it picked to strategies that have this attribute, and none else.
        if len(devices) != 1:
            raise ValueError(f"strategy='odb' runs on one device, but the trainer has {len(devices)}: use strategy='odb_ddp'")
        self._root_device, self._has_device = devices[0], True


class ODBDDPStrategy(ODBStrategyMixin, DDPStrategy):
    """DistributedDataParallel, on CPU (gloo) and GPU."""

    strategy_name = "odb_ddp"

    def block_backward_sync(self) -> Any:
        # A static graph is recorded in the first backward, which fails in torch unless gradients are exchanged in it.
        return nullcontext() if self._ddp_kwargs.get("static_graph") else super().block_backward_sync()
