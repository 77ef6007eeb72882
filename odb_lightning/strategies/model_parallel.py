"""FSDP2, on GPU and CPU (gloo)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule

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
        self._gathered: list[nn.Parameter] = []

    def setup_environment(self) -> None:
        if self._data_parallel_size == "auto":  # which is one rank per node for Lightning
            self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Notes parameters as a forward has them, gathered: it is those that gradients arrive in, not the sharded ones."""
        self._gathered = []
        info = self.step_info
        if info is None or self._multiplier(info) != 0.0:
            return super().training_step(*args, **kwargs)
        parts = [part for part in self._module.modules() if isinstance(part, FSDPModule)]
        hooks = [part.register_forward_pre_hook(self._note) for part in parts]  # type: ignore[attr-defined]
        try:
            return super().training_step(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, part: nn.Module, _: Any) -> None:
        self._gathered += part.parameters()

    def _gradient_leaves(self) -> Iterable[nn.Parameter]:
        return [*super()._gradient_leaves(), *self._gathered]
