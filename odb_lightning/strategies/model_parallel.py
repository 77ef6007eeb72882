"""FSDP2, on GPU and CPU (gloo)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from odb_lightning.strategies.steps import ODBStrategyMixin


class ODBModelParallelStrategy(ODBStrategyMixin, ModelParallelStrategy):
    """Sharded data parallelism by `fully_shard`, applied in the module's `configure_model`. Takes what `ModelParallelStrategy`
    takes, and what `ODBStrategyMixin` does.

    `data_parallel_size="auto"` is all ranks. Tensor parallelism is refused: its peers would have to get the same batches.
    Shard submodules, not the LightningModule itself, whose `forward` no step calls.
    """

    strategy_name = "odb_model_parallel"

    def __init__(
        self, data_parallel_size: int | Literal["auto"] = "auto", tensor_parallel_size: int = 1, **kwargs: Any
    ) -> None:
        if tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size!r} can't be used with online dynamic batches: tensor-parallel "
                "ranks need the same batches, and each rank has its own; use tensor_parallel_size=1"
            )
        super().__init__(data_parallel_size=data_parallel_size, tensor_parallel_size=1, **kwargs)
        self._zeroing: list[RemovableHandle] = []

    def setup_environment(self) -> None:
        if self._data_parallel_size == "auto":  # which is one rank per node for Lightning
            self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Hooks on sharded parameters never fire; on the unsharded ones, which a forward brings, they do."""
        info = self.step_info
        if info is None or self._multiplier(info) != 0.0:
            return super().training_step(*args, **kwargs)
        forward_hooks = [part.register_forward_pre_hook(self._zero_gradients) for part in self._sharded_parts()]
        try:
            return super().training_step(*args, **kwargs)
        finally:
            for hook in forward_hooks:
                hook.remove()

    def _sharded_parts(self) -> list[Any]:
        return [module for module in self._module.modules() if isinstance(module, FSDPModule)]

    def _zero_gradients(self, module: nn.Module, _: Any) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                self._zeroing.append(parameter.register_hook(torch.zeros_like))

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        finally:
            for hook in self._zeroing:
                hook.remove()
            self._zeroing = []
