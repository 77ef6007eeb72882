"""What an ODB strategy does beyond the Lightning strategy it extends."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from odb_lightning.batch import LossReduction, LossScaling, StepInfo
from odb_lightning.loader import ODBDataLoader
from odb_lightning.loader_options import check_choice
from odb_lightning.runtime.counting import DEFAULT_RULE, NumSupervised, check_rule
from odb_lightning.runtime.errors import ODBLoaderError
from odb_lightning.runtime.seeding import preserved_random_state
from odb_lightning.strategies.denominator import WindowCounts
from odb_lightning.strategies.feeding import FeedsBatches, as_list
from odb_lightning.strategies.idle import BorrowedBuffers, gradient_leaves, zeroed_gradients
from odb_lightning.strategies.metric_lists import even_lists, leave_lists
from odb_lightning.strategies.metrics import counting_nothing
from odb_lightning.strategies.sigterm import EndsOnSigterm
from odb_lightning.strategies.unused import LeavesOutUnused
from odb_lightning.strategies.updates import CountsUpdates
from odb_lightning.strategies.whole_checkpoints import WritesWholeCheckpoints


class ODBStrategyMixin(FeedsBatches, LeavesOutUnused, CountsUpdates, WritesWholeCheckpoints, EndsOnSigterm):
    """Mix in before a Lightning strategy: `class MyDDP(ODBStrategyMixin, DDPStrategy)`.

    * The user's hooks and steps see exactly what `collate_fn` returned.
    * `backward` multiplies the loss by `StepInfo.loss_multiplier`: if `training_step` returns the mean over its batch's
      supervised tokens (`loss_scaling="token"`) or samples ("sample"), the gradient of an update is that of the mean over all
      of them, over ranks and micro-batches. For a module that returns their sum say `loss_reduction="sum"`; `"none"` leaves
      the loss alone. Logged values stay the user's. `manual_backward` is scaled, too.
    * `denominator`: who counts. "loader": the ODBDataLoader. "strategy": the strategy itself counts the batches of any loader
      with equally many on each rank, by `num_supervised_fn` (as that of ODBDataLoader), a window of them ahead.
    * In an idle step the module runs on a stand-in, so that every collective happens on every rank; gradients are zero, and
      random state, buffers, metrics and logs are put back. `step_info.is_idle` tells hooks.
    * A batch without targets contributes zero; a window without any target on any rank steps neither the optimizer nor a
      learning rate that is scheduled by step, and no more does an overflow.
    * What ends one rank ends all of them, with the first cause; SIGTERM to any does.
    """

    _runs_backward_without_targets = True
    """In a window without any, after which no optimizer steps."""

    def __init__(
        self,
        *args: Any,
        loss_scaling: LossScaling = "token",
        loss_reduction: LossReduction = "mean",
        denominator: Literal["loader", "strategy"] = "loader",
        num_supervised_fn: NumSupervised = DEFAULT_RULE,
        **kwargs: Any,
    ) -> None:
        check_choice("loss_scaling", loss_scaling, ("token", "sample", "none"))
        check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
        check_choice("denominator", denominator, ("loader", "strategy"))
        check_rule(num_supervised_fn)
        if loss_scaling == "none" and (loss_reduction == "sum" or denominator == "strategy"):
            given = 'loss_reduction="sum"' if loss_reduction == "sum" else 'denominator="strategy"'
            raise ValueError(
                f'{given} has no meaning with loss_scaling="none", which leaves the loss alone: leave one of them out'
            )
        if denominator == "loader" and num_supervised_fn is not DEFAULT_RULE:
            raise ValueError(
                'num_supervised_fn has no effect on a strategy with denominator="loader": give it to the ODBDataLoader, or say '
                'denominator="strategy"'
            )
        super().__init__(*args, **kwargs)
        self.loss_scaling = loss_scaling
        self.loss_reduction = loss_reduction
        self.denominator = denominator
        self._counts = WindowCounts(num_supervised_fn)
        self._borrowed = BorrowedBuffers()
        self._is_in_transfer = False
        """Of an idle batch."""
        self._idle_metrics = ExitStack()
        """What keeps metrics from counting a stand-in, from its transfer until that of the next batch."""
        self._num_backwards = 0
        self._backwards_before: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """How many there had been when an optimizer stepped last."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self.data_parallel_size > 1:
            even_lists(self)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves the batch, and makes what is known of it the current info: once per batch, before any hook on it. A transfer of
        the user's own changes nothing."""
        if not self._is_in_batch:
            self._advance(self._progress.total.ready, dataloader_idx)
            self._weigh_logs()
        info = self._current_info
        if info is None or not info.is_idle:
            return super().batch_to_device(batch, device, dataloader_idx)
        self._is_in_transfer = True
        try:
            with preserved_random_state():
                return super().batch_to_device(batch, device, dataloader_idx)
        finally:
            self._is_in_transfer = False

    def _advance(self, position: int, dataloader_idx: int) -> None:
        super()._advance(position, dataloader_idx)
        self._idle_metrics.close()
        info = self._current_info
        if info is not None and info.is_idle:
            self._idle_metrics.enter_context(counting_nothing(self._module, self._counts_nothing))

    def _counts_nothing(self) -> bool:
        return self._is_in_transfer or self._is_in_batch

    # --- steps ---

    def _begin_batch(self) -> None:
        self._release_schedules()
        super()._begin_batch()

    def on_train_start(self) -> None:
        """Raises ValueError for what would be trained wrongly without a word."""
        super().on_train_start()
        loaders = as_list(self._trainer.train_dataloader)
        has_ours = any(isinstance(getattr(proxy, "loader", None), ODBDataLoader) for proxy in loaders)
        if len(loaders) != 1 and (has_ours or self.denominator == "strategy"):
            # What is known of a step is known of one batch.
            kind = "one ODBDataLoader" if has_ours else 'one loader with denominator="strategy"'
            raise ValueError(
                f"{type(self).__name__} trains on {kind}, but there are {len(loaders)} training loaders: join their "
                "data sets (torch.utils.data.ConcatDataset) in one"
            )
        if has_ours and self.data_parallel_size > 1 and any(isinstance(m, nn.SyncBatchNorm) for m in self._module.modules()):
            raise ValueError(
                "SyncBatchNorm can't be used with an ODBDataLoader on several ranks: a rank that is idle runs the module on a "
                "stand-in, which would go into the statistics of the others. Use BatchNorm (sync_batchnorm=False), GroupNorm "
                "or LayerNorm"
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        info = self.step_info
        if self.loss_scaling != "none":
            self._check_known(info)
        with self._in_step(info):
            if info is None or not info.is_idle:
                return super().training_step(*args, **kwargs)
            self._borrowed.take(self._module)  # until after the backward, which may run parts of the forward again
            with preserved_random_state():
                output = super().training_step(*args, **kwargs)
            if not self._module.automatic_optimization:
                self._borrowed.give_back()
            return output

    def _check_known(self, info: StepInfo | None) -> None:
        """Raises RuntimeError for a step whose loss would silently be scaled wrongly."""
        if info is None:
            raise RuntimeError(
                "nothing is known of this training batch, so its loss can't be scaled: give the trainer one loader for "
                "training, not several, and take the batch, not a dataloader_iter, in training_step"
            )
        (loader,) = as_list(self._trainer.train_dataloader)
        if loader.position != self._progress.total.ready - 1:
            raise RuntimeError(
                "this training batch is none of those that the loader gave, so its loss can't be scaled: leave it to the "
                "trainer to draw batches"
            )
        if self._module.automatic_optimization and info.accumulate != self._trainer.accumulate_grad_batches:
            raise RuntimeError(
                f"accumulate_grad_batches became {self._trainer.accumulate_grad_batches} while windows of {info.accumulate} "
                "steps are planned: to change it between epochs use a GradientAccumulationScheduler, which is known beforehand"
            )

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's predictions; None for an idle step."""
        predictions = self._evaluation_step(super().predict_step, *args, **kwargs)
        return None if self.val_step_info is not None and self.val_step_info.is_idle else predictions

    def _evaluation_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        info = self.val_step_info
        with self._in_step(info):
            if info is None or not info.is_idle:
                return step(*args, **kwargs)
            self._borrowed.take(self._module)
            try:
                with preserved_random_state():
                    return step(*args, **kwargs)
            finally:
                self._borrowed.give_back()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of the loss times this batch's multiplier. `manual_backward` comes here, too."""
        info = self.step_info
        self._num_backwards += 1
        try:
            if info is None:
                return super().backward(closure_loss, optimizer, *args, **kwargs)
            if self._window_has_no_target(info) and not self._runs_backward_without_targets:
                return closure_loss  # on all ranks alike, so no collective is left waiting
            with self._leaving_out_unused(info):
                return self._scaled_backward(info, closure_loss, optimizer, *args, **kwargs)
        finally:
            if self._module.automatic_optimization:
                self._borrowed.give_back()

    def _scaled_backward(self, info: StepInfo, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        multiplier = self._multiplier(info)
        if multiplier == 0.0:
            with zeroed_gradients([*self._gradient_leaves(), *gradient_leaves(loss)]):
                # Times zero for what no hook reaches: a checkpointed part may run again in the backward.
                return super().backward(loss * 0.0, *args, **kwargs)
        return super().backward(loss * multiplier, *args, **kwargs)

    def _multiplier(self, info: StepInfo) -> float:
        multiplier = info.loss_multiplier(self.loss_scaling, self.loss_reduction)
        if self.loss_scaling == "none" or self._module.automatic_optimization:
            return multiplier
        return multiplier / info.accumulate  # which nobody divides by in manual optimization

    def _gradient_leaves(self) -> Iterable[nn.Parameter]:
        """The parameters that autograd accumulates gradients in, besides those in the graph of the loss."""
        return self._module.parameters()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Steps the optimizer, unless the window had no target on any rank: zero gradients, too, move momentum and weights.

        Raises RuntimeError for gradients that were not scaled.
        """
        is_left_out = self.step_info is not None and self._window_has_no_target(self.step_info)
        with self._moving_schedules(optimizer, is_left_out):
            result = closure() if is_left_out else super().optimizer_step(optimizer, closure, model, **kwargs)
        self._check_scaled(optimizer)
        return result

    def _check_scaled(self, optimizer: Any) -> None:
        if self._module.automatic_optimization or self.loss_scaling == "none":
            return
        if self._backwards_before.get(optimizer, 0) == self._num_backwards:
            raise RuntimeError(
                "an optimizer was stepped without a manual_backward since its last step, so no loss was scaled: call "
                'self.manual_backward(loss) in the place of loss.backward(), or say loss_scaling="none"'
            )
        self._backwards_before[optimizer] = self._num_backwards

    def _window_has_no_target(self, info: StepInfo) -> bool:
        if self.loss_scaling == "none":
            return False
        return not (info.window_num_tokens_supervised if self.loss_scaling == "token" else info.window_num_samples)

    # --- the end ---

    def teardown(self) -> None:
        leave_lists(self)
        self._close_loaders()
        self._idle_metrics.close()
        self._counts.close()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Ends the loaders' processes, which releases the peers' too. If a peer had failed before, the exception says so."""
        for cause in self._close_loaders(exception):
            if isinstance(exception, Exception) and not isinstance(exception, ODBLoaderError):
                _add_note(exception, f"Another rank failed first:\n{cause}")
        super().on_exception(exception)

    def _close_loaders(self, reason: BaseException | None = None) -> set[str]:
        self._borrowed.give_back()
        causes = {loader.close(reason) for loader in list(self._odb_loaders)}
        return {cause for cause in causes if cause is not None}

    @property
    def _trainer(self) -> Any:
        return self._module.trainer

    @property
    def _module(self) -> Any:
        module = self.lightning_module
        assert module is not None
        return module


def _add_note(exception: Exception, text: str) -> None:
    """Below the exception's own text, where Python (3.11) can do so, else in the log."""
    if hasattr(exception, "add_note"):
        exception.add_note(text)
    else:
        logging.getLogger(__name__).error(text)
