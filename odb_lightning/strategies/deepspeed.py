"""DeepSpeed ZeRO, on GPU and, unlike Lightning's own, on CPU (gloo)."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor

from odb_lightning.strategies.steps import ODBStrategyMixin


class ODBDeepSpeedStrategy(ODBStrategyMixin, DeepSpeedStrategy):
    """ZeRO stages 0 to 3. Takes what `DeepSpeedStrategy` takes, and what `ODBStrategyMixin` does.

    The strategy, not the engine, says where an accumulation window ends, since DeepSpeed neither steps a last window that is
    short nor counts windows per epoch; and it leaves out the engine's division by the accumulation count, since Lightning
    has divided already.
    """

    strategy_name = "odb_deepspeed"
    handles_gradient_accumulation = False
    _runs_backward_without_targets = False  # ZeRO would add what it offloaded before to the gradients of the next update

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # For DeepSpeed's own throughput figures, which batches of varying size make meaningless; "auto" would read the loader's
        # batch size, which an ODB loader does not have.
        kwargs.setdefault("logging_batch_size_per_gpu", 1)
        super().__init__(*args, **kwargs)

    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, CPUAccelerator):
            super().setup_environment()
            return
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        # Used by DeepSpeed's inference only, and built with a C++ compiler at each start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        assert self.parallel_devices is not None
        # DeepSpeed wants a local rank where Lightning's CPU devices have no index.
        self.parallel_devices = [torch.device("cpu", index) for index in range(len(self.parallel_devices))]
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def block_backward_sync(self) -> Any:
        return nullcontext()  # the engine's no_sync refuses ZeRO-2 and 3; the boundary says the same

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.deepspeed_engine.set_gradient_accumulation_boundary(self.ends_window)
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)
