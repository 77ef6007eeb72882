"""What Lightning 2.6 and DeepSpeed do with a strategy. A test that fails says that upstream has changed: look at our
design again."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from lightning.fabric.strategies.deepspeed import _validate_device_index_selection
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from tiny_fit import Loader, Tiny, make_trainer
from torch.utils.data import DataLoader


class OneGPU(CUDAAccelerator):
    """Says that there is one GPU; fine as long as nothing is put on it."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [0]

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cuda", 0)]

    @staticmethod
    def is_available() -> bool:
        return True


def test_a_single_device_strategy_chosen_by_name_is_on_the_cpu_whatever_the_trainer_has() -> None:
    assert make_trainer(accelerator=OneGPU()).strategy.root_device == torch.device("cuda", 0)
    assert make_trainer(accelerator=OneGPU(), strategy="single_device").strategy.root_device == torch.device("cpu")


def test_registered_names_are_taken_over_only_with_override_and_are_lightnings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(StrategyRegistry, "trap_name", {})
    with pytest.raises(ValueError, match="override=True"):
        StrategyRegistry.register("trap_name", SingleDeviceStrategy)
    StrategyRegistry.register("trap_name", SingleDeviceStrategy, override=True)
    assert isinstance(make_trainer(strategy="trap_name").strategy, SingleDeviceStrategy)
    twin = pytest.importorskip("pytorch_lightning")
    assert "trap_name" not in twin.strategies.StrategyRegistry
    assert twin.strategies.StrategyRegistry is not lightning.pytorch.strategies.StrategyRegistry


class Proxy:
    """Hands on the second half of each pair, and tells the strategy the first, in order."""

    def __init__(self, loader: Any, events: list[Any]) -> None:
        self.loader, self.events = loader, events

    def __iter__(self) -> Any:
        for batch in self.loader:
            self.events.append(("unwrapped", batch["number"]))
            yield batch["data"]


def test_a_strategy_may_put_a_proxy_before_the_loader_and_no_hook_sees_the_wrapper() -> None:
    events: list[Any] = []

    class Wrapped(Loader):
        def batches(self) -> Any:
            yield from ({"number": number, "data": torch.tensor([number + 0.5])} for number in range(self.num_batches))

    class Unwrapping(SingleDeviceStrategy):
        def process_dataloader(self, dataloader: object) -> object:
            events.append("process_dataloader")
            return Proxy(dataloader, events)

        def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            events.append(("batch_to_device", batch.item()))
            return super().batch_to_device(batch, *args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            events.append("strategy.training_step")
            return super().training_step(*args, **kwargs)

        def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            events.append("strategy.backward")
            return super().backward(closure_loss, *args, **kwargs)

    class Hooked(Tiny):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            events.append(("on_before_batch_transfer", batch.item()))
            return batch

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            events.append(("on_train_batch_start", batch.item()))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            events.append(("training_step", batch.item()))
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            events.append(("on_train_batch_end", batch.item()))

    loader = Wrapped(2)
    trainer = make_trainer(strategy=Unwrapping(device="cpu"))
    trainer.fit(Hooked(), loader)

    def one_batch(value: float) -> list[Any]:
        hooks = ["on_before_batch_transfer", "batch_to_device", "on_train_batch_start", "training_step", "on_train_batch_end"]
        batch: list[Any] = [(hook, value) for hook in hooks]
        return [*batch[:3], "strategy.training_step", batch[3], "strategy.backward", batch[4]]

    ahead = ["process_dataloader", ("unwrapped", 0), ("unwrapped", 1)]
    assert events == [*ahead, *one_batch(0.5), *one_batch(1.5)]
    assert loader.events == ["iter", "iter"]
    assert isinstance(trainer.train_dataloader, Proxy)


def test_the_base_strategy_gives_the_loader_back_as_it_is() -> None:
    loader = Loader()
    assert Strategy.process_dataloader(SingleDeviceStrategy(), loader) is loader


def test_stock_deepspeed_is_refused_on_cpu() -> None:
    with pytest.raises(RuntimeError, match="only supported on CUDA GPUs but `CPUAccelerator` is used"):
        make_trainer(strategy="deepspeed_stage_2").fit(Tiny(), Loader(2))


def test_deepspeed_wants_devices_with_an_index_and_a_cpu_can_have_one() -> None:
    with pytest.raises(RuntimeError, match="device indices"):
        _validate_device_index_selection([torch.device("cpu")] * 2)
    _validate_device_index_selection([torch.device("cpu", 0), torch.device("cpu", 1)])
    assert torch.zeros(1, device=torch.device("cpu", 1)).device == torch.device("cpu")


def attached(strategy: DeepSpeedStrategy, loader: object, **options: Any) -> DeepSpeedStrategy:
    """The strategy as it is when it writes its configuration, without any process group."""
    trainer, model = make_trainer(strategy=strategy, **options), Tiny()
    model.trainer = trainer
    strategy._lightning_module = model
    trainer._data_connector.attach_data(model, train_dataloaders=loader)
    return strategy


@pytest.mark.parametrize(
    "options", [{"batch_size": None}, {"batch_sampler": [[0], [1]]}], ids=["no-batch-size", "batch-sampler"]
)
def test_deepspeed_reads_a_batch_size_that_is_not_there(options: dict[str, Any]) -> None:
    strategy = attached(DeepSpeedStrategy(), DataLoader([1, 2], **options))  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="no attribute 'batch_size'"):
        strategy._format_batch_size_and_grad_accum_config()


def test_deepspeed_divides_the_loss_by_accumulate_once_more() -> None:
    """Lightning has divided before `backward`; the engine is told the same count, and divides by it unless told not to."""
    strategy = attached(DeepSpeedStrategy(logging_batch_size_per_gpu=1), Loader(), accumulate_grad_batches=4)
    strategy._format_batch_size_and_grad_accum_config()
    assert isinstance(strategy.config, dict)
    assert strategy.config["gradient_accumulation_steps"] == 4
    assert strategy.handles_gradient_accumulation
    # the method is decorated without functools.wraps
    engine_backward = inspect.getclosurevars(DeepSpeedEngine.backward).nonlocals.get("func", DeepSpeedEngine.backward)
    assert inspect.signature(engine_backward).parameters["scale_wrt_gas"].default is True

    calls: list[dict[str, Any]] = []
    engine = SimpleNamespace(backward=lambda loss, **options: calls.append(options))
    model = Tiny()
    model._trainer = SimpleNamespace(model=engine)  # type: ignore[assignment]
    precision = DeepSpeedPrecision("32-true")
    precision.backward(torch.ones(()), model, None)
    precision.backward(torch.ones(()), model, None, scale_wrt_gas=False)
    assert calls == [{}, {"scale_wrt_gas": False}]


def test_zero_3_keeps_small_parameters_whole_by_default() -> None:
    assert DeepSpeedZeroConfig().param_persistence_threshold == 100_000
