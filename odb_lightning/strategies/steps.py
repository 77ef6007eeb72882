"""What an ODB strategy does beyond the Lightning strategy it extends."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from odb_lightning.batch import LossReduction, LossScaling, StepInfo
from odb_lightning.loader import ODBDataLoader
from odb_lightning.loader_options import check_choice
from odb_lightning.runtime.counting import DEFAULT_RULE, NumSupervised, check_rule
from odb_lightning.runtime.errors import ODBLoaderError
from odb_lightning.runtime.seeding import preserved_random_state
from odb_lightning.strategies.denominator import WindowCounts
from odb_lightning.strategies.idle import (
    BorrowedBuffers,
    enough_for_batch_norm,
    gradient_leaves,
    zeroed_gradients,
)
from odb_lightning.strategies.logs import WeighsLogs
from odb_lightning.strategies.metric_lists import even_lists, leave_lists
from odb_lightning.strategies.metrics import counting_nothing
from odb_lightning.strategies.resume import ResumesExactly
from odb_lightning.strategies.sigterm import EndsOnSigterm
from odb_lightning.strategies.unused import LeavesOutUnused
from odb_lightning.strategies.unwrapping import UnwrappingLoader, unwrapping
from odb_lightning.strategies.updates import CountsUpdates
from odb_lightning.strategies.whole_checkpoints import WritesWholeCheckpoints


class ODBStrategyMixin(WeighsLogs, LeavesOutUnused, CountsUpdates, ResumesExactly, WritesWholeCheckpoints, EndsOnSigterm):
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
        self.step_info: StepInfo | None = None
        """What is known of the batch in training, from its transfer to the device to the end of `on_train_batch_end`."""
        self.val_step_info: StepInfo | None = None
        """The same for the batch in evaluation; None for a loader that is not ours."""
        # With the accumulation planned. Weakly: a loader that Lightning has replaced goes, and its processes with it.
        self._odb_loaders: weakref.WeakKeyDictionary[ODBDataLoader, int] = weakref.WeakKeyDictionary()
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
            even_lists()

    # --- loaders ---

    def process_dataloader(self, dataloader: Any) -> Any:
        """The loader as the trainer iterates it. Raises ValueError for one whose loss can't be scaled."""
        loader = super().process_dataloader(dataloader)
        if not self._trainer.training:
            if isinstance(loader, ODBDataLoader):
                self._attach(loader, 1)
            return unwrapping(loader, lambda: self._evaluation_batches(loader))
        if isinstance(loader, ODBDataLoader):
            if self._counts.has_rule:
                rank_zero_warn("the strategy's num_supervised_fn is ignored: the ODBDataLoader counts, by its own")
            self._check_scheduled_accumulation(loader)
            self._attach(loader, self._accumulation(loader))
            self._resume(loader)
            self._warn_of_a_restarted_epoch()
        elif self.loss_scaling != "none" and self.denominator == "loader":
            raise ValueError(
                f"{type(self).__name__} scales the loss by counts that only an ODBDataLoader brings, but the training loader "
                f"is a {type(dataloader).__name__}: use ODBDataLoader.from_dataloader(loader, l_max=...), or ODBDataModule; or "
                f'let the strategy count, {type(self).__name__}(denominator="strategy"); or say loss_scaling="none"'
            )
        is_counted = isinstance(loader, ODBDataLoader) or self.denominator == "strategy"
        marks_last = is_counted and isinstance(self._trainer.limit_train_batches, int)
        proxy = unwrapping(loader, lambda: self._training_batches(loader), marks_last)
        proxy.on_request = self._begin_batch
        return proxy

    def _attach(self, loader: ODBDataLoader, accumulate: int) -> None:
        limit = self._limit_on_batches()
        loader.attach(
            rank=self.data_parallel_rank,
            world_size=self.data_parallel_size,
            accumulate=accumulate,
            max_steps=limit if isinstance(limit, int) else None,
        )
        self._odb_loaders[loader] = accumulate

    def _training_batches(self, loader: Any) -> Iterator[Any]:
        """Those of the epoch that begins."""
        epoch = self._epoch_in_training()
        if isinstance(loader, ODBDataLoader):
            accumulate = self._accumulation(loader)
            if accumulate != self._odb_loaders[loader]:
                self._attach(loader, accumulate)
            # Lightning tells nobody but samplers of the epoch, and those after the first batch was drawn.
            loader.set_epoch(epoch)
        elif self.denominator == "strategy":
            return self._counts.batches(
                loader,
                epoch=epoch,
                first_step=self._first_step(),
                accumulate=self._accumulation(loader),
                limit=self._steps_of_an_epoch(loader),
                timeout=getattr(self, "_timeout", None),
            )
        return enough_for_batch_norm(iter(loader), self._module)

    def _evaluation_batches(self, loader: Any) -> Iterator[Any]:
        if isinstance(loader, ODBDataLoader):
            loader.set_epoch(0)
        with preserved_random_state():  # of which a torch DataLoader draws
            batches = iter(loader)
        return enough_for_batch_norm(batches, self._module)

    def _limit_on_batches(self) -> int | float | None:
        trainer = self._trainer
        if trainer.training:
            return trainer.limit_train_batches
        if trainer.testing:
            return trainer.limit_test_batches
        return trainer.limit_predict_batches if trainer.predicting else trainer.limit_val_batches

    def _epoch_in_training(self) -> int:
        if self._trainer.overfit_batches > 0:
            return 0  # the same batches in each epoch
        # trainer.current_epoch is set only after the first batch of a resumed run was drawn.
        return int(self._trainer.fit_loop.epoch_progress.current.processed)

    def _warn_of_a_restarted_epoch(self) -> None:
        epochs = self._trainer.fit_loop.epoch_progress.current
        if epochs.started > epochs.processed and self._resumed is None:
            rank_zero_warn(
                f"the checkpoint lies inside epoch {epochs.processed}, and does not hold where in it: the epoch is trained "
                "from its beginning, so its first samples are trained once more. A checkpoint at the end of an epoch is exact."
            )

    @property
    def data_parallel_rank(self) -> int:
        """Position among the ranks that see different data."""
        return int(self._trainer.global_rank)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that see different data."""
        return int(self._trainer.world_size)

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
        """To what is known of the batch at `position` of those that the trainer has had."""
        if self._trainer.training:
            loaders = _as_list(self._trainer.train_dataloader)
            if len(loaders) == 1 and isinstance(loaders[0], UnwrappingLoader):
                info = loaders[0].info_at(position)
                if info is not self.step_info:
                    self._take_info(info)
                if info is not None and info is loaders[0].last:
                    self._end_epoch()
        else:
            loader = _as_list(self._evaluation_loaders())[dataloader_idx]
            self.val_step_info = loader.info_at(position) if isinstance(loader, UnwrappingLoader) else None
        self._idle_metrics.close()
        info = self._current_info
        if info is not None and info.is_idle:
            self._idle_metrics.enter_context(counting_nothing(self._module, self._counts_nothing))

    def _counts_nothing(self) -> bool:
        return self._is_in_transfer or self._is_in_batch

    def _end_epoch(self) -> None:
        """Tells the trainer of the last batch of an epoch that ends before its integer limit. It takes the limit for the number
        of batches, and would neither validate nor step the last window (PL#10290)."""
        trainer = self._trainer
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
        if trainer.val_check_interval == 1.0:
            trainer.val_check_batch = float("inf")  # with the last batch, whichever that is

    def _evaluation_loaders(self) -> Any:
        trainer = self._trainer
        if trainer.testing:
            return trainer.test_dataloaders
        if trainer.predicting:
            return trainer.predict_dataloaders
        return trainer.val_dataloaders

    # --- steps ---

    def _begin_batch(self) -> None:
        self._release_schedules()
        super()._begin_batch()

    def on_train_start(self) -> None:
        """Raises ValueError for what would be trained wrongly without a word."""
        super().on_train_start()
        loaders = _as_list(self._trainer.train_dataloader)
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
        (loader,) = _as_list(self._trainer.train_dataloader)
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
        leave_lists()
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


def _as_list(loaders: Any) -> list[Any]:
    """The loaders in a trainer's collection of them."""
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
