"""A stand-in leaves nothing in a module: metrics, buffers and gradients; and what is not to weigh weighs nothing in logs."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torchmetrics import Accuracy, CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import MulticlassAUROC

from odb_lightning import ODBDataLoader
from odb_lightning.strategies.idle import BorrowedBuffers, gradient_leaves, zeroed_gradients
from odb_lightning.strategies.logs import _neutral
from odb_lightning.strategies.metric_lists import even_lists, leave_lists
from odb_lightning.strategies.metrics import counting_nothing
from odb_lightning.strategies.unwrapping import unwrapping
from tests.multiprocess.trainers import make_trainer
from tests.multiprocess.training_cases import Model, Samples, _flat, make_network, pad, reference, token_losses

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.`"),
    pytest.mark.filterwarnings("ignore:The ``compute`` method of metric"),
    pytest.mark.filterwarnings("ignore:a batch of 1 samples has no target"),
]


# --- metrics ---

Batch = tuple[float, bool]
"""A value, and whether it is a stand-in's."""

ORDERS: dict[str, list[Batch]] = {
    "first": [(99.0, True), (1.0, False), (2.0, False)],
    "in between": [(1.0, False), (2.0, False), (99.0, True), (3.0, False), (4.0, False)],
    "last": [(1.0, False), (2.0, False), (99.0, True)],
}


def update(metric: Metric, value: float) -> None:
    metric.update(torch.tensor(value))


def call(metric: Metric, value: float) -> None:
    metric(torch.tensor(value))


def update_and_compute(metric: Metric, value: float) -> None:
    metric.update(torch.tensor(value))
    metric.compute()


def classify(metric: Metric, value: float) -> None:
    """Half of them rightly."""
    size = int(value) % 7
    metric.update(torch.tensor([1, 1]).repeat(size), torch.tensor([0, 1]).repeat(size))


def call_on_scores(metric: Metric, value: float) -> None:
    metric(torch.softmax(torch.arange(12.0).view(4, 3) * value % 5, 1), torch.tensor([0, 1, 2, 1]))


def two_accuracies() -> MetricCollection:
    """Told apart by what they have counted alone."""
    ignored = {"all": None, "some": 0}
    return MetricCollection(
        {name: Accuracy("multiclass", num_classes=3, ignore_index=index) for name, index in ignored.items()}
    )


METRICS: dict[str, tuple[Callable[[], Any], Callable[[Any, float], None]]] = {
    "sum": (SumMetric, update_and_compute),
    "mean, called": (MeanMetric, call),
    "max, called": (MaxMetric, call),
    "a list": (CatMetric, update),
    "a list, called": (CatMetric, call),
    "a list that can't be empty": (lambda: MulticlassAUROC(num_classes=3), call_on_scores),
    "running mean": (lambda: RunningMean(window=3), update),
    "running mean, called": (lambda: RunningMean(window=3), call),
    "min and max": (lambda: MinMaxMetric(MeanMetric()), update_and_compute),
    "composed": (lambda: SumMetric() + MeanMetric(), update),
    "a collection": (two_accuracies, classify),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_as_if_there_had_been_no_stand_in(name: str, order: str) -> None:
    make, count = METRICS[name]
    module, undisturbed = nn.ModuleDict({"metric": make()}), make()
    for value, is_idle in ORDERS[order]:
        if is_idle:
            with counting_nothing(module, lambda: True):
                count(module["metric"], value)
        else:
            count(module["metric"], value)
            count(undisturbed, value)
    torch.testing.assert_close(module["metric"].compute(), undisturbed.compute())


def test_a_metric_is_put_back_at_once_and_what_else_is_done_to_it_stays() -> None:
    metric = SumMetric()
    metric.update(1.0)
    assert metric.compute() == 1.0
    with counting_nothing(nn.ModuleList([metric]), lambda: True):
        metric.update(99.0)
        assert metric._computed is None, "as on the other ranks, whose compute is a collective"
        assert metric.compute() == 1.0
        assert metric(99.0) == 99.0, "the value of the batch alone"
        assert metric.sum_value == 1.0
        metric.reset()
    assert metric.sum_value == 0.0
    metric.update(2.0)
    assert metric.compute() == 2.0


def test_while_no_batch_is_idle_metrics_count_as_ever() -> None:
    metric = SumMetric()
    is_idle = True
    with counting_nothing(nn.ModuleList([metric]), lambda: is_idle):
        metric.update(99.0)
        is_idle = False
        metric.update(1.0)
        metric(2.0)
    assert metric.compute() == 3.0


@pytest.mark.parametrize(
    "duplicate", [lambda metric: pickle.loads(pickle.dumps(metric)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
def test_a_copy_of_a_metric_counts_and_leaves_the_metric_alone(duplicate: Callable[[Metric], Metric]) -> None:
    metric = SumMetric()
    metric.update(1.0)
    with counting_nothing(nn.ModuleList([metric]), lambda: True):
        inside = duplicate(metric)
        inside.update(2.0)
        assert inside(4.0) == 4.0
        metric.update(99.0)
        metric(99.0)
    inside(8.0)
    assert inside.compute() == pickle.loads(pickle.dumps(inside)).compute() == 15.0
    assert metric.compute() == 1.0


def test_lists_are_evened_until_the_last_trainer_is_done() -> None:
    """A hook of a fit may run a trainer of its own, on one device or on several."""
    original = Metric._sync_dist
    outer, inner = nn.Module(), nn.Module()
    even_lists(outer)
    even_lists(inner)
    evened = Metric._sync_dist
    leave_lists(inner)
    leave_lists(nn.Module())
    assert Metric._sync_dist is evened is not original
    leave_lists(outer)
    assert Metric._sync_dist is original


# --- buffers ---


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = torch.zeros(2)
        self.register_buffer("one", shared)
        self.register_buffer("other", shared)
        self.register_buffer("lazy", None)

    def forward(self) -> None:
        self.other += 1
        assert self.one is self.other
        self.lazy = torch.ones(1)
        self.register_buffer("new", torch.ones(1))


def test_buffers_with_two_names_unset_ones_and_new_ones_are_put_back() -> None:
    module, borrowed = Buffered(), BorrowedBuffers()
    borrowed.take(module)
    module()
    borrowed.give_back()
    assert module.one is module.other
    assert module.one.tolist() == [0.0, 0.0]
    assert module.lazy is None
    assert not hasattr(module, "new")


class Grown(nn.Module):
    """As rotary embeddings that grow with the longest sequence so far, and note how far they have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.zeros(2))
        self._length = 2
        self.num_calls = 0

    def forward(self, length: int) -> Tensor:
        self.num_calls += 1
        if length > self._length:
            self.register_buffer("frequencies", torch.zeros(length))
            self._length = length
        return self.frequencies[:length]


class WithGrown(nn.Module):
    """Notes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.grown = Grown()
        self.register_buffer("longest", torch.zeros(()))
        self.num_calls = 0

    def forward(self, length: int) -> Tensor:
        self.num_calls += 1
        self.register_buffer("longest", torch.tensor(float(length)))
        return self.grown(length)


def test_a_part_with_a_new_buffer_is_as_it_was_and_the_module_keeps_its_attributes() -> None:
    module, borrowed = WithGrown(), BorrowedBuffers()
    for num_calls, length in enumerate((3, 2), 1):
        borrowed.take(module)
        module(length)
        borrowed.give_back()
        assert module.num_calls == num_calls
        assert module.longest == 0.0
        assert module.grown._length == len(module.grown.frequencies) == 2
    assert module.grown.num_calls == 1, "of the call that put no new buffer in place"
    assert len(module(4)) == 4


# --- gradients ---


def test_gradients_are_zero_in_every_leaf_of_the_loss() -> None:
    """One that no module has, too, and whatever the loss is."""
    inside, outside = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    loss = (inside(torch.ones(1, 2)) * outside * float("inf")).sum()
    with zeroed_gradients(gradient_leaves(loss)):
        loss.backward()
    for parameter in (*inside.parameters(), outside):
        assert parameter.grad is not None
        assert parameter.grad.count_nonzero() == 0
    assert not outside._backward_hooks


# --- what a rank without weight adds to a reduction ---


@pytest.mark.parametrize(
    ("operation", "reduce"),
    [
        ("sum", torch.add),
        (ReduceOp.SUM, torch.add),
        ("product", torch.mul),
        (ReduceOp.PRODUCT, torch.mul),
        ("max", torch.maximum),
        (ReduceOp.MIN, torch.minimum),
        (ReduceOp.BAND, torch.bitwise_and),
        (ReduceOp.BOR, torch.bitwise_or),
    ],
)
def test_an_idle_ranks_part_leaves_a_reduction_as_it_is(operation: Any, reduce: Any) -> None:
    has_bits = reduce in (torch.bitwise_and, torch.bitwise_or)
    for dtype in (torch.int64, torch.bool) if has_bits else (torch.float32, torch.int64, torch.bool):
        values = torch.tensor([-5.0, 0.0, 1.0, 7.0]).to(dtype)
        assert reduce(values, _neutral(operation, torch.full_like(values, 1))).to(dtype).tolist() == values.tolist()


# --- on one device ---


def fit(model: Model, samples: list[int], **options: Any) -> lightning.Trainer:
    """A batch of each."""
    loader = ODBDataLoader(
        Samples(), l_max=12, max_rows=1, collate_fn=pad, sampler=samples, num_workers=0, num_supervised_fn="causal"
    )
    trainer = make_trainer("odb", devices=1, **options)
    trainer.fit(model, loader)
    return trainer


def error(model: Model, accumulate: int = 1) -> float:
    steps = [(info.epoch, info.step, list(info.sample_ids)) for info in model.infos]
    return float((_flat(model.network).double() - reference([steps], accumulate, None)).abs().max())


WITHOUT_TARGETS = [5, 6]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_window_without_targets_moves_nothing_and_is_not_logged(accumulate: int) -> None:
    """Momentum would go on. The module's loss is NaN there."""
    model = Model()
    trainer = fit(model, [0, 1, *WITHOUT_TARGETS, 4, 10], accumulate_grad_batches=accumulate)
    without = [not info.num_tokens_supervised for info in model.infos]
    assert without.count(True) == 2
    assert error(model, accumulate) < 2e-6
    losses = [loss for loss, none in zip(model.losses, without, strict=True) if not none]
    assert float(trainer.callback_metrics["train_loss_epoch"]) == pytest.approx(sum(losses) / len(losses))


def test_no_target_at_all_leaves_the_parameters_alone() -> None:
    model = Model()
    fit(model, WITHOUT_TARGETS)
    assert torch.equal(_flat(model.network), _flat(make_network()))


class Peeks(lightning.Callback):
    """Moves batches by itself."""

    def _move(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.batch_to_device({"more": torch.ones(1)}, trainer.strategy.root_device)

    on_train_start = on_train_batch_start = on_train_batch_end = on_train_epoch_end = _move


def test_batches_that_a_callback_moves_are_not_counted() -> None:
    model = Model()
    fit(model, [0, 1, 4, 10], callbacks=[Peeks()], max_epochs=2)
    assert [info.step for info in model.infos] == [0, 1, 2, 3] * 2
    assert error(model) < 2e-6


def test_a_step_on_a_batch_that_is_not_the_loaders_is_refused() -> None:
    class Twice(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:  # as if the trainer had gone on
                self.trainer.fit_loop.epoch_loop.batch_progress.increment_ready()

    with pytest.raises(RuntimeError, match="none of those that the loader gave"):
        fit(Twice(), [0, 1, 4])


class Manual(Model):
    """Steps two optimizers; `is_scaled` says how backward is done in each step."""

    is_scaled: tuple[bool, ...] = (True,)

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = token_losses(self.network, batch, "mean")
        if self.is_scaled[batch_idx % len(self.is_scaled)]:
            self.manual_backward(loss)
        else:
            loss.backward()
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.network[0], self.network[1:])]


@pytest.mark.parametrize("pattern", [(True,), (False,), (True, False)])
def test_under_manual_optimization_a_loss_that_was_not_scaled_is_refused(pattern: tuple[bool, ...]) -> None:
    model = Manual()
    model.is_scaled = pattern
    if all(pattern):
        fit(model, [0, 1])
        assert len(model.infos) == 2
    else:
        with pytest.raises(RuntimeError, match=r"without a manual_backward .* self\.manual_backward\(loss\)"):
            fit(model, [0, 1])
        assert len(model.infos) == pattern.index(False)


class WithState:
    def __init__(self) -> None:
        self.state = 0

    def __iter__(self) -> Any:
        return iter([1])

    def state_dict(self) -> Any:
        return {"state": self.state}

    def load_state_dict(self, state: Any) -> None:
        self.state = state["state"]


class SizedWithState(WithState):
    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("kind", [WithState, SizedWithState])
def test_the_proxy_of_a_loader_with_a_state_has_its_methods(kind: type[WithState]) -> None:
    """As a protocol is looked up from Python 3.12 on, past __getattr__."""
    loader = kind()
    proxy: Any = unwrapping(loader, lambda: iter(loader))
    for name in ("state_dict", "load_state_dict"):
        assert callable(inspect.getattr_static(proxy, name))
    proxy.load_state_dict({"state": 3})
    assert proxy.state_dict() == {"state": 3}
    assert hasattr(proxy, "__len__") == (kind is SizedWithState)
    assert not hasattr(unwrapping([1], lambda: iter([1])), "state_dict")
