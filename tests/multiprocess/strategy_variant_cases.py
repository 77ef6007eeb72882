"""Variants of the strategies, objectives and schedules of accumulation, run by every rank (see ranks.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import _common_utils as fsdp_internals

from odb_lightning import ODBDDPStrategy, ODBFSDPStrategy, ODBStrategyMixin
from tests.multiprocess.exact_fits import (
    LIMIT,
    Model,
    fit,
    odb_loader,
    outcome,
    per_sample,
    plain_loader,
    refusal,
    target_weights,
    unshifted,
    weighted,
)
from tests.multiprocess.fitting import make, num_ranks, shard_for
from tests.multiprocess.training_cases import LEARNING_RATE, VOCABULARY, _whole, make_network

CASES: dict[str, dict[str, Any]] = {
    "k=1, rank 1 idle": {"shards": [[0, 1, 2, 3, 4, 8, 9], [10, 7]]},
    "k=1, rank 0 idle from the first step": {"shards": [[], [0, 1, 2]]},
    "k=4, short last window": {"shards": [[10, 7], [0, 1, 2, 3, 4, 8]], "accumulate": 4, "max_epochs": 2},
    "windows without targets first": {"shards": [[5, 0, 13], [6, 10]], "max_epochs": 2},
    "windows without targets, k=2": {"shards": [[5, 5, 5, 0, 1], [6, 6]], "accumulate": 2, "max_epochs": 2},
    "clipped, a last window of one": {"shards": [[0, 1, 4], [10, 12]], "accumulate": 2, "max_epochs": 2, "clip": 0.1},
}
"""Samples 5 and 6 have no target."""


class MyDDP(ODBStrategyMixin, DDPStrategy):
    """A strategy of the user's own."""


class Branching(nn.Module):
    """Some of its parameters get a gradient only from some samples, and one never does."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = make_network()
        self.extra = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.trunk[0](ids)
        chosen = ids[:, 0] % 2 == 0
        if chosen.any():
            hidden = hidden + self.extra(hidden) * chosen[:, None, None]
        return self.trunk[1:](hidden)


def make_branching(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Branching().to(dtype)


class _NoStream:
    """All there is to wait for on a CPU."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: _NoStream()


class _CPU:
    """What FSDP1 asks of an accelerator."""

    Stream = Event = _NoStream

    def current_stream(self, *_: Any) -> _NoStream:
        return _NoStream()

    def stream(self, _: Any) -> Any:
        return contextlib.nullcontext()

    def current_device(self) -> str:
        return "cpu"

    def is_available(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: None


class FSDP1OnCPU(ODBFSDPStrategy):
    """On a stand-in for the accelerator: what is sharded, hooked and reduced is as on a GPU."""

    def setup_environment(self) -> None:
        fsdp_internals._FSDPDeviceHandle.from_device = classmethod(lambda cls, device: cls(device, _CPU()))
        super(ODBFSDPStrategy, self).setup_environment()


class FSDP1Model(Model):
    use_orig_params = True

    def configure_model(self) -> None:
        if not isinstance(self.network, FullyShardedDataParallel):
            self.network = FullyShardedDataParallel(
                self.network,
                device_id=torch.device("cpu"),
                use_orig_params=self.use_orig_params,
                auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear),
            )

    def on_train_end(self) -> None:
        flat = [part._flat_param.numel() for part in FullyShardedDataParallel.fsdp_modules(self.network)]
        with FullyShardedDataParallel.summon_full_params(self.network):
            self.final = torch.cat([parameter.detach().flatten().clone() for parameter in self.network.parameters()])
        assert len(flat) == 3 and sum(flat) < 0.6 * len(self.final), "left unsharded"


class _OfFlatParameters(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=LEARNING_RATE, momentum=self.momentum)


class FSDP1FlatModel(_OfFlatParameters, FSDP1Model):
    use_orig_params = False


class FSDP1GPUModel(Model):
    def on_train_end(self) -> None:
        with FullyShardedDataParallel.summon_full_params(self.trainer.strategy.model):
            self.final = torch.cat([parameter.detach().flatten().cpu() for parameter in self.network.parameters()])


class FSDP1GPUFlatModel(_OfFlatParameters, FSDP1GPUModel):
    pass


def _offloaded(strategy: str, **options: Any) -> Any:
    """ZeRO with the optimizer, and if so told the parameters, kept on the CPU. A torch optimizer: DeepSpeed's own would be
    compiled first."""
    made = make(strategy, offload_optimizer=True, **options)
    made.config["zero_force_ds_cpu_optimizer"] = False
    return made


VARIANTS: dict[str, tuple[Callable[[], Any], Callable[[], Model], Callable[..., nn.Module]]] = {
    "a DDP of the user's, find_unused_parameters": (
        lambda: MyDDP(find_unused_parameters=True, timeout=LIMIT),
        lambda: Model(network=make_branching),
        make_branching,
    ),
    "DDP, static_graph": (lambda: ODBDDPStrategy(static_graph=True, timeout=LIMIT), Model, make_network),
    "ZeRO 0": (lambda: make("zero0"), Model, make_network),
    "ZeRO 1, optimizer offloaded": (lambda: _offloaded("zero1"), Model, make_network),
    "ZeRO 2, optimizer offloaded": (lambda: _offloaded("zero2"), Model, make_network),
    "ZeRO 3, optimizer offloaded": (lambda: _offloaded("zero3"), Model, make_network),
    "ZeRO 3, parameters and optimizer offloaded": (lambda: _offloaded("zero3", offload_parameters=True), Model, make_network),
    "FSDP1, original parameters": (lambda: FSDP1OnCPU(timeout=LIMIT), FSDP1Model, make_network),
    "FSDP1, flat parameters": (
        lambda: FSDP1OnCPU(timeout=LIMIT, use_orig_params=False),
        FSDP1FlatModel,
        make_network,
    ),
}


def on_gpus() -> dict[str, Any]:
    """FSDP1 as it is, with and without original parameters."""
    results = {}
    for use_orig_params in (True, False):
        for name, case in CASES.items():
            if "clip" not in case:
                strategy = ODBFSDPStrategy(timeout=LIMIT, auto_wrap_policy={nn.Linear}, use_orig_params=use_orig_params)
                kind = FSDP1GPUModel if use_orig_params else FSDP1GPUFlatModel
                results[f"{use_orig_params}: {name}"] = _fit(
                    lambda s=strategy: s, kind, make_network, **case, accelerator="gpu"
                )
    return results


def can_run(variant: str, case: dict[str, Any]) -> bool:
    """Lightning does not clip by norm under FSDP1."""
    return not ("clip" in case and "FSDP1" in variant)


def all_cases(variants: list[str]) -> dict[str, Any]:
    """Every case under every variant named."""
    return {
        f"{variant}: {name}": _fit(*VARIANTS[variant], **case)
        for variant in variants
        for name, case in CASES.items()
        if can_run(variant, case)
    }


def _fit(
    strategy: Callable[[], Any],
    model: Callable[[], Model],
    network: Callable[..., nn.Module],
    shards: list[list[int]],
    accumulate: int = 1,
    max_epochs: int = 1,
    clip: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    made = model()
    options |= {"accumulate_grad_batches": accumulate, "max_epochs": max_epochs, "gradient_clip_val": clip}
    trainer = fit(strategy(), made, odb_loader(shards), **options)
    (optimizer,) = trainer.optimizers
    return outcome(trainer, made, accumulate=accumulate, network=network, clip=clip) | {
        "offloaded": [name for name in ("cpu_offload", "offload_optimizer", "offload_param") if getattr(optimizer, name, False)]
    }


OBJECTIVES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "a dict": ({"returns": lambda total, weight: {"loss": total / weight, "more": 1}}, {}, {}),
    "a sum": ({"returns": lambda total, _: total}, {"loss_reduction": "sum"}, {}),
    "unshifted": ({"objective": unshifted}, {}, {"num_supervised_fn": "unshifted"}),
    "weighted": ({"objective": weighted}, {}, {"num_supervised_fn": lambda batch: float(target_weights(batch).sum())}),
    "samples": ({"objective": per_sample}, {"loss_scaling": "sample"}, {}),
    "a sum over samples": (
        {"objective": per_sample, "returns": lambda total, _: total},
        {"loss_scaling": "sample", "loss_reduction": "sum"},
        {},
    ),
}
"""Options of the module, the strategy and the loader."""
UNEQUAL = [[0, 1, 2, 3, 4, 8, 9], [10, 7]]
NEVER_IDLE = [[0, 1, 4], [10, 12, 13]]
"""Of which no two fit in a batch, with 3, 9 and 12, and 12, 5 and 7 targets (less those in the first column)."""


def objectives(strategy: str) -> dict[str, Any]:
    """Kinds of losses, with idle steps and windows of two; and windows that change from epoch to epoch, which Lightning refuses
    under DeepSpeed."""
    results, devices = {}, num_ranks(strategy)
    for name, (options, strategy_options, loader_options) in OBJECTIVES.items():
        model = Model(**options, shard=shard_for(strategy))
        loader = odb_loader(UNEQUAL, l_max=24, **loader_options)
        trainer = fit(make(strategy, **strategy_options), model, loader, accumulate_grad_batches=2, devices=devices)
        results[name] = outcome(trainer, model, accumulate=2)
    if not strategy.startswith("zero"):
        results["scheduled"] = _scheduled(strategy)
    return results | {"unscaled": _unscaled(strategy)}


def _scheduled(strategy: str) -> dict[str, Any]:
    scheduler, model = GradientAccumulationScheduler({0: 3, 2: 1, 3: 2}), Model(shard=shard_for(strategy))
    trainer = fit(make(strategy), model, odb_loader(UNEQUAL), max_epochs=4, callbacks=[scheduler], devices=num_ranks(strategy))
    return outcome(trainer, model, accumulate=scheduler.get_accumulate_grad_batches)


class PlainModel(Model):
    """For strategies of Lightning's, which know nothing of the step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...


def _unscaled(strategy: str) -> dict[str, Any]:
    """Three steps in windows of two; besides, how far the parameters are from those after the same batches under a strategy of
    Lightning's: for DeepSpeed, which Lightning has on GPUs alone, under DDP."""
    model, devices = Model(shard=shard_for(strategy)), num_ranks(strategy)
    trainer = fit(
        make(strategy, loss_scaling="none"), model, odb_loader(NEVER_IDLE), accumulate_grad_batches=2, devices=devices
    )
    result = outcome(trainer, model, accumulate=2)
    plain = PlainModel(shard=shard_for(strategy))
    ddp = DDPStrategy(timeout=LIMIT)
    plain_strategy = {"fsdp2": ModelParallelStrategy(2, 1), "single": SingleDeviceStrategy("cpu")}.get(strategy, ddp)
    batches = [ids for _, _, ids in model.steps]
    fit(plain_strategy, plain, plain_loader([batches] * 2), accumulate_grad_batches=2, devices=devices)
    return result | {"from_lightning": float((model.final - plain.final).abs().max())}


def deepspeed_and_a_schedule() -> str:
    """Lightning's refusal."""
    scheduler = GradientAccumulationScheduler({0: 1, 1: 2})
    return refusal(lambda: fit(make("zero0"), Model(), odb_loader([[0, 1], [2]]), max_epochs=2, callbacks=[scheduler]))


class _Manual(Model):
    """A second network under manual optimization, with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.second = make_network()

    def configure_optimizers(self) -> Any:
        parts = self.network, self.second
        return [torch.optim.SGD(part.parameters(), lr=LEARNING_RATE, momentum=self.momentum) for part in parts]


class Kept(_Manual):
    """The second network's gradient of an even step is kept for its update in the next; what is noted is of that network."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        first.step()
        first.zero_grad()
        if batch_idx % 2 == 0:
            self.manual_backward(self.returns(*self.objective(self.second, batch)))
        else:
            second.step()
            second.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            super().on_train_batch_end(outputs, batch, batch_idx)

    def on_train_end(self) -> None:
        self.final = _whole(list(self.second.parameters()))


class Toggled(_Manual):
    """One optimizer after the other, with what is not its own frozen. Stand-ins alone use `extra`, the second's; weight decay
    would move it."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.ModuleDict({"head": nn.Linear(VOCABULARY, VOCABULARY), "extra": nn.Linear(VOCABULARY, VOCABULARY)})

    def _logits(self, ids: Tensor) -> Tensor:
        logits = self.second["head"](self.network(ids))
        return self.second["extra"](logits) if self.trainer.strategy.step_info.is_idle else logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.returns(*self.objective(self._logits, batch)))
            if self.trainer.strategy.ends_window:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(part.parameters(), lr=LEARNING_RATE, weight_decay=0.1) for part in (self.network, self.second)
        ]


class Later(Model):
    """From the second epoch on its last layer is used by stand-ins alone."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(VOCABULARY, VOCABULARY)
        self.biases: list[list[float]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.network(batch["input_ids"])
        if self.current_epoch == 0 or self.trainer.strategy.step_info.is_idle:
            logits = self.extra(logits)
        return logits.logsumexp(-1).mean()

    def on_train_epoch_end(self) -> None:
        self.biases.append(self.extra.bias.tolist())


def overfitted() -> list[list[float]]:
    """The bias of that layer after each of three epochs of one step, in which rank 1 is idle."""
    model = Later()
    strategy = ODBDDPStrategy(find_unused_parameters=True, timeout=LIMIT)
    fit(strategy, model, odb_loader([[0], []]), max_epochs=3, overfit_batches=1)
    return model.biases


def manual_with_unused() -> dict[str, Any]:
    """Under `find_unused_parameters`. In four steps, of which rank 1 is idle in all but the first."""
    shards, toggled = [[0, 1, 2, 3], [10]], Toggled()
    kept = Kept()
    trainer = fit(ODBDDPStrategy(find_unused_parameters=True, timeout=LIMIT), kept, odb_loader(shards))
    initial = [parameter.detach().clone() for parameter in toggled.second.parameters()]
    fit(ODBDDPStrategy(find_unused_parameters=True, timeout=LIMIT), toggled, odb_loader(shards, accumulate=2))
    moved = [float((after - before).abs().max()) for after, before in zip(toggled.second.parameters(), initial, strict=True)]
    return {
        "kept": outcome(trainer, kept),
        "overfitted": overfitted(),
        "head": moved[:2],
        "extra": moved[2:],
        "is_idle": [info.is_idle for info in toggled.infos],
    }
