"""Lightning strategies that know of online dynamic batches; registered by name when the package is imported."""

from lightning.pytorch.strategies import StrategyRegistry

from odb_lightning.strategies.deepspeed import ODBDeepSpeedStrategy
from odb_lightning.strategies.fsdp import ODBFSDPStrategy
from odb_lightning.strategies.model_parallel import ODBModelParallelStrategy
from odb_lightning.strategies.plain import ODBDDPStrategy, ODBSingleDeviceStrategy
from odb_lightning.strategies.steps import ODBStrategyMixin

__all__ = [
    "ODBDDPStrategy",
    "ODBDeepSpeedStrategy",
    "ODBFSDPStrategy",
    "ODBModelParallelStrategy",
    "ODBSingleDeviceStrategy",
    "ODBStrategyMixin",
]


def _register() -> None:
    # override: the module may be reloaded, and Lightning refuses a name it has.
    StrategyRegistry.register("odb", ODBSingleDeviceStrategy, description="ODB on one device", override=True)
    StrategyRegistry.register("odb_ddp", ODBDDPStrategy, description="ODB with DDP", override=True)
    StrategyRegistry.register("odb_model_parallel", ODBModelParallelStrategy, description="ODB with FSDP2", override=True)
    StrategyRegistry.register("odb_fsdp", ODBFSDPStrategy, description="ODB with FSDP1, on GPU", override=True)
    for stage in (1, 2, 3):
        StrategyRegistry.register(
            f"odb_deepspeed_stage_{stage}",
            ODBDeepSpeedStrategy,
            description=f"ODB with DeepSpeed ZeRO stage {stage}",
            override=True,
            stage=stage,
        )


_register()
