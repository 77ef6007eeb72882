"""DeepSpeed ZeRO, on GPU and, unlike Lightning's own, on CPU (gloo)."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from odb_lightning.checkpoints import ranks_of_zero
from odb_lightning.strategies.parts import PartsUsed
from odb_lightning.strategies.steps import ODBStrategyMixin


class ODBDeepSpeedStrategy(ODBStrategyMixin, DeepSpeedStrategy):
    """ZeRO stages 0 to 3. Takes what `DeepSpeedStrategy` takes, and what `ODBStrategyMixin` does.

    The strategy, not the engine, says where an accumulation window ends, since DeepSpeed neither steps a last window that is
    short nor counts windows per epoch; and it leaves out the engine's division by the accumulation count, since Lightning
    has divided already.
    """

    strategy_name = "odb_deepspeed"
    handles_gradient_accumulation = False
    _runs_backward_without_targets = False  # ZeRO would add what it offloaded before to the gradients of the next update

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # For DeepSpeed's own throughput figures, which batches of varying size make meaningless; "auto" would read the loader's
        # batch size, which an ODB loader does not have.
        kwargs.setdefault("logging_batch_size_per_gpu", 1)
        super().__init__(*args, **kwargs)
        self._has_gradient = False
        self._is_step_due = False
        """Whether a window has ended without a step of the optimizer since."""
        self._uses: PartsUsed | None = None

    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, CPUAccelerator):
            super().setup_environment()
            return
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        # Used by DeepSpeed's inference only, and built with a C++ compiler at each start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        assert self.parallel_devices is not None
        # DeepSpeed wants a local rank where Lightning's CPU devices have no index.
        self.parallel_devices = [torch.device("cpu", index) for index in range(len(self.parallel_devices))]
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Raises ValueError for one of another number of ranks, which DeepSpeed can't deal anew."""
        saved = len(ranks_of_zero(Path(checkpoint_path)))
        trains = self._trainer.state.fn == TrainerFn.FITTING and not self.deepspeed_engine.load_universal_checkpoint()
        if trains and saved not in (0, self.world_size):
            raise ValueError(
                f"{checkpoint_path} was saved by {saved} ranks and this run has {self.world_size}: DeepSpeed can't deal the "
                f"optimizer's state to other ranks. Go on with {saved} ranks; or take the weights alone (lightning.pytorch."
                "utilities.deepspeed.convert_zero_checkpoint_to_fp32_state_dict makes a file of them, for "
                "load_from_checkpoint); or make a universal checkpoint (python -m deepspeed.checkpoint.ds_to_universal "
                f"--inject_missing_state --input_folder {checkpoint_path}/checkpoint --output_folder "
                f'{checkpoint_path}/universal) and say strategy.config["checkpoint"] = {{"load_universal": True}}'
            )
        return super().load_checkpoint(checkpoint_path, weights_only)

    def block_backward_sync(self) -> Any:
        return nullcontext()  # the engine's no_sync refuses ZeRO-2 and 3; the boundary says the same

    def on_train_start(self) -> None:
        super().on_train_start()
        self._is_step_due = False
        engine = self.deepspeed_engine
        stage, is_offloaded = engine.zero_optimization_stage(), engine.zero_use_cpu_optimizer()
        if stage in (1, 2) or (stage == 3 and is_offloaded):
            is_alike_in_window = is_offloaded or (stage == 1 and engine.zero_overlap_comm())
            self._uses = PartsUsed(self._module, self.root_device, is_alike_in_window)

    def teardown(self) -> None:
        if self._uses is not None:
            self._uses.close()
            self._uses = None
        super().teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.deepspeed_engine.set_gradient_accumulation_boundary(self.ends_window)
        self._has_gradient = False
        if self._begins_window:
            _begin_window(self.deepspeed_engine.optimizer)
            if self._uses is not None:
                self._uses.of_window.clear()
        return super().training_step(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        if self.deepspeed_engine.is_gradient_accumulation_boundary():  # else the engine has only counted the batch
            self._is_step_due = False
            _forget_gradients(self.deepspeed_engine.optimizer)
        return result

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Raises RuntimeError for the second of a step, which would take the place of the first; in manual optimization for the
        first of a window under ZeRO 1 and 2 if the optimizer was not stepped after the one before; and for the last of a window
        in which ranks, or micro-batches, used different parts of the module, where DeepSpeed needs them alike."""
        if self._has_gradient:
            raise RuntimeError(
                "DeepSpeed takes one backward in a training_step: of several, the last alone counts. Add the losses, and call "
                "manual_backward once"
            )
        if self._is_step_due and self.deepspeed_engine.zero_optimization_stage() in (1, 2):
            raise RuntimeError(
                "this backward would replace gradients that no step of the optimizer has used, under ZeRO 1 and 2. To step "
                "every k-th batch in manual optimization give accumulate=k to the ODBDataLoader, and step where "
                "self.trainer.strategy.ends_window"
            )
        self._has_gradient = True
        self._is_step_due = not self._module.automatic_optimization and self.ends_window
        if self._uses is None:
            return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)
        with self._uses.noted():
            loss = super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)
        if self.ends_window:
            self._uses.check()
        return loss


def _begin_window(optimizer: Any) -> None:
    """ZeRO 2 would add to what is left of a window that did not come to its end: a hook may end an epoch inside of one (see
    `tests/multiprocess/test_loss_cases.py`). The attributes are stage 1's and 2's own, and are so after each update."""
    if hasattr(optimizer, "micro_step_id") and not hasattr(optimizer, "grad_partitions_flat_buffer"):
        optimizer.micro_step_id = -1
        for gradients in ("averaged_gradients", "all_grad_tensors"):
            getattr(optimizer, gradients, {}).clear()


def _forget_gradients(optimizer: Any) -> None:
    """Those of an update that was made. ZeRO 3, and 1 and 2 with the optimizer offloaded, write over them where the next update
    has some, and apply them again where it has none: in a part of the module that its batches do not use (DeepSpeed 0.19;
    `tests/multiprocess/test_loss_cases.py` holds that it does). The attributes are stage 3's own, then that of 1 and 2."""
    gradients = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if gradients is not None:
        gradients.zero_()
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        for partition in getattr(optimizer, name, ()):
            if partition.grad is not None:  # on the CPU, with the optimizer
                partition.grad.zero_()
