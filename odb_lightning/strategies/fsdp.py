"""FSDP1, on GPU; on CPU torch has FSDP2 only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from odb_lightning.strategies.steps import ODBStrategyMixin


class ODBFSDPStrategy(ODBStrategyMixin, FSDPStrategy):
    """`FullyShardedDataParallel`. Takes what `FSDPStrategy` takes, and what `ODBStrategyMixin` does."""

    strategy_name = "odb_fsdp"

    def setup_environment(self) -> None:
        if isinstance(self.accelerator, CPUAccelerator):
            raise RuntimeError(
                "strategy='odb_fsdp' needs GPUs: torch's FullyShardedDataParallel does not run on CPU. Use "
                "strategy='odb_model_parallel' (FSDP2), 'odb_deepspeed_stage_3' or 'odb_ddp' there"
            )
        super().setup_environment()

    def _gradient_leaves(self) -> Iterable[Any]:
        """The flat parameters, of which those of the module are views in forward and backward; and what FSDP leaves alone."""
        assert isinstance(self.model, nn.Module)
        flat = [part._flat_param for part in FullyShardedDataParallel.fsdp_modules(self.model)]
        return [parameter for parameter in flat if parameter is not None] + list(self._module.parameters())
