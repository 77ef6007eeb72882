"""Online Dynamic Batching for Lightning: batches by token budget, formed from the lengths that samples turn out to have."""

from odb_lightning.batch import IDLE_DATA, ODBBatch, StepInfo
from odb_lightning.datamodule import ODBDataModule
from odb_lightning.loader import ODBDataLoader
from odb_lightning.runtime.errors import ODBLoaderError
from odb_lightning.runtime.settings import LoaderStats, Timeouts
from odb_lightning.sampling import ShardedSampler
from odb_lightning.strategies import ODBDDPStrategy, ODBDeepSpeedStrategy, ODBSingleDeviceStrategy, ODBStrategyMixin

__all__ = [
    "IDLE_DATA",
    "LoaderStats",
    "ODBBatch",
    "ODBDDPStrategy",
    "ODBDataLoader",
    "ODBDataModule",
    "ODBDeepSpeedStrategy",
    "ODBLoaderError",
    "ODBSingleDeviceStrategy",
    "ODBStrategyMixin",
    "ShardedSampler",
    "StepInfo",
    "Timeouts",
]
