"""What Lightning 2.6 and torchmetrics do with metrics and logs, of which no public interface tells. A test that fails says that
upstream has changed: look at our design again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_fit import Loader, Tiny, make_trainer
from torchmetrics import Accuracy, CatMetric, MeanMetric, Metric, MetricCollection, SumMetric


def test_a_metric_knows_in_update_whether_the_next_compute_syncs() -> None:
    class Watched(Metric):
        full_state_update = False
        seen: list[bool]

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.seen = []
            self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

        def update(self) -> None:
            self.seen.append(self._to_sync)

        def compute(self) -> torch.Tensor:
            return self.total

    for each_step, in_call in ((False, [False]), (True, [True, True])):  # twice: all batches, and this one
        metric = Watched(dist_sync_on_step=each_step)
        metric.update()
        metric()
        assert metric.seen == [True, *in_call]


def test_a_computed_value_is_cached_until_the_next_update_or_call() -> None:
    metric = SumMetric()
    metric.update(1.0)
    metric.compute()
    assert metric._computed == 1.0
    metric.update(1.0)
    assert metric._computed is None
    metric.compute()
    metric(3.0)
    assert (metric._computed, metric._forward_cache, metric._update_count) == (None, 3.0, 3)


def test_a_collection_takes_metrics_of_equal_states_for_one_after_the_first_update() -> None:
    """So do two that have counted nothing in it."""
    metrics = MetricCollection({str(index): Accuracy("multiclass", num_classes=3, ignore_index=index) for index in (0, 1)})
    assert not metrics._groups_checked
    metrics.update(torch.tensor([2, 2]), torch.tensor([2, 2]))
    assert metrics._groups_checked
    assert len(metrics.compute_groups) == 1


def test_what_is_logged_goes_through_update_metrics_and_batches_are_counted_around_their_hooks() -> None:
    """A batch is "ready" after its transfer and "completed" after its last hook. The mean over an epoch is of what is in the
    entry's states, the value of a step in its `_forward_cache`."""
    events: list[Any] = []

    class Logs(Tiny):
        def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
            return self.note("transfer", batch)

        def note(self, name: str, value: Any) -> Any:
            now = self.trainer.fit_loop.epoch_loop.batch_progress.current
            events.append((name, now.ready - now.completed))
            return value

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.note("step", None)
            self.log("loss", torch.tensor(2.0), on_step=True, on_epoch=True, batch_size=3)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            self.note("end", None)
            results = self.trainer._results
            entry = results["training_step.loss"]
            assert (entry.value, entry.cumulated_batch_size, entry._forward_cache) == (6.0, 3, 2.0)
            assert set(entry._defaults) == {"value", "cumulated_batch_size"}
            assert entry.is_tensor
            results.update_metrics = lambda key, value, batch_size: events.append((key, float(value), batch_size))
            self.log("by_hook", 5.0, batch_size=4)

        def on_train_epoch_end(self) -> None:
            self.note("epoch end", None)

    make_trainer().fit(Logs(), Loader(1))
    assert events == [("transfer", 0), ("step", 1), ("end", 1), ("on_train_batch_end.by_hook", 5.0, 4), ("epoch end", 0)]


def test_the_value_of_a_step_of_a_metric_is_that_of_its_last_call() -> None:
    metric = MeanMetric()

    class Logs(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.metric = metric

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.metric(torch.tensor(2.0))
            self.log("metric", self.metric, on_step=True, on_epoch=True)
            assert not self.trainer._results["training_step.metric"].is_tensor
            assert self.trainer._results["training_step.metric"]._forward_cache is self.metric._forward_cache
            return super().training_step(batch, batch_idx)

    make_trainer().fit(Logs(), Loader(1))


@pytest.mark.parametrize("values", [[], [1], [1, 2, 3]])
def test_a_list_is_gathered_as_often_as_this_rank_has_elements(values: list[int]) -> None:
    """Whatever the other ranks have. One that is concatenated is gathered once, but an empty one as floats in one dimension."""
    elements = [torch.full((2, 3), value) for value in values]
    gathered: list[torch.Tensor] = []

    def gather(value: torch.Tensor, group: Any) -> list[torch.Tensor]:
        gathered.append(value)
        return [value]

    for reduction in (None, "cat"):
        metric = CatMetric()
        metric.add_state("listed", [], dist_reduce_fx=reduction)
        metric.listed = list(elements)
        gathered.clear()
        metric._sync_dist(gather)
        of_list = [value for value in gathered if value.dtype == torch.int64]
        if reduction is None:
            assert len(of_list) == len(values)
        elif values:
            assert [value.shape for value in of_list] == [(2 * len(values), 3)]
        else:
            assert of_list == [] and {(value.dtype, value.shape) for value in gathered} == {(torch.float32, (0,))}
