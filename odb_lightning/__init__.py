"""Online Dynamic Batching for Lightning: batches by token budget, formed from the lengths that samples turn out to have."""

import importlib
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

from odb_lightning.batch import IDLE_DATA, ODBBatch, StepInfo
from odb_lightning.loader import ODBDataLoader
from odb_lightning.runtime.errors import ODBLoaderError
from odb_lightning.runtime.settings import HELPER_PROCESS_NAME, HELPER_VARIABLE, LoaderStats, Timeouts
from odb_lightning.sampling import ShardedSampler
from odb_lightning.sharding import current_shard

_is_helper = multiprocessing.current_process().name == HELPER_PROCESS_NAME or HELPER_VARIABLE in os.environ

if TYPE_CHECKING or not _is_helper:
    from odb_lightning.datamodule import ODBDataModule
    from odb_lightning.strategies import (
        ODBDDPStrategy,
        ODBDeepSpeedStrategy,
        ODBFSDPStrategy,
        ODBModelParallelStrategy,
        ODBSingleDeviceStrategy,
        ODBStrategyMixin,
    )
else:

    def __getattr__(name: str) -> Any:
        # A loader's own processes, started by spawn or forkserver, are ready seconds earlier without Lightning.
        if name not in __all__:
            raise AttributeError(f"module 'odb_lightning' has no attribute {name!r}")
        module = "odb_lightning.datamodule" if name == "ODBDataModule" else "odb_lightning.strategies"
        return getattr(importlib.import_module(module), name)


__all__ = [
    "IDLE_DATA",
    "LoaderStats",
    "ODBBatch",
    "ODBDDPStrategy",
    "ODBDataLoader",
    "ODBDataModule",
    "ODBDeepSpeedStrategy",
    "ODBFSDPStrategy",
    "ODBLoaderError",
    "ODBModelParallelStrategy",
    "ODBSingleDeviceStrategy",
    "ODBStrategyMixin",
    "ShardedSampler",
    "StepInfo",
    "Timeouts",
    "current_shard",
]
