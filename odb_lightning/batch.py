"""What a loader hands to the training process: a batch, and what is known of its step on all ranks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

LossScaling = Literal["token", "sample", "none"]
"""What the loss of a batch is a mean over: its supervised tokens, its samples, or neither (leave it as it is)."""

LossReduction = Literal["mean", "sum"]
"""What the loss of a batch is of its targets' losses."""


class _IdleData:
    """The type of `IDLE_DATA`; one instance per process, also after unpickling."""

    def __repr__(self) -> str:
        return "IDLE_DATA"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "IDLE_DATA"


IDLE_DATA = _IdleData()
"""`ODBBatch.data` of a step in which this rank has nothing to train on while other ranks do."""


@dataclass(frozen=True)
class StepInfo:
    """One step of one rank. `num_*` count this rank's batch, `global_num_*` the step on all ranks,
    `window_num_*` the whole accumulation window (up to `accumulate` consecutive steps) on all ranks."""

    epoch: int
    step: int
    """Position within the epoch, from 0; equal on all ranks."""
    is_idle: bool
    sample_ids: tuple[Hashable, ...]
    """What the sampler gave for each sample, in the order in which `collate_fn` got them."""
    num_samples: int
    num_tokens_real: int
    """Sum of the observed lengths."""
    num_tokens_padded: int
    """`num_samples * max_length`."""
    num_tokens_supervised: int | float
    """Targets that the mean loss of this batch is over (`num_supervised_fn`)."""
    max_length: int
    global_num_samples: int
    global_num_tokens_supervised: int | float
    window_num_tokens_supervised: int | float
    window_num_samples: int
    num_active_ranks: int = 1
    """Ranks that are not idle in this step."""
    world_size: int = 1
    accumulate: int = 1
    """Micro-batches per update that the window was planned for; the last window of an epoch can be shorter."""
    position: ClassVar[Any] = None
    """Set on each that a loader gives; no field, as it is nothing to write down."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's state (see `ODBDataLoader.state_dict`) when this step was trained, for a loop that fetches ahead."""
        if self.position is None:
            raise RuntimeError("this StepInfo was sent to another process, or made there, and has no state")
        state: dict[str, Any] = self.position.state_dict()
        return state

    def loss_multiplier(self, mode: LossScaling = "token", reduction: LossReduction = "mean") -> float:
        """The factor for this batch's mean loss, for a trainer that divides each loss by `accumulate` and
        averages gradients over `world_size` ranks: `world_size * accumulate * n / N`, with n this batch's and N
        the window's supervised tokens (`"token"`) or samples (`"sample"`); `"none"` is 1. For a loss that is the sum over
        the batch's targets (`reduction="sum"`) it is without n.

        The gradient of the update is then that of the mean over all targets of the window. It is 0.0 for an idle
        step and for a batch or a window without targets (multiply no loss by it then: the mean over nothing is NaN).
        Source: arXiv 2606.19989, loss scaling.
        """
        if mode == "token":
            part, whole = self.num_tokens_supervised, self.window_num_tokens_supervised
        elif mode == "sample":
            part, whole = self.num_samples, self.window_num_samples
        elif mode == "none":
            return 0.0 if self.is_idle else 1.0
        else:
            raise ValueError(f"loss scaling {mode!r} is unknown: choose 'token', 'sample' or 'none'")
        if not part:
            return 0.0
        return self.world_size * self.accumulate * (part if reduction == "mean" else 1) / whole


class ODBBatch:
    """What `collate_fn` returned (`data`, or `IDLE_DATA`), with the `StepInfo` of the step.

    It is no mapping and no sequence on purpose: a trainer that takes it for the data itself would silently train with
    a wrong loss and on idle steps, so such a use raises `TypeError` with the mend.
    """

    __slots__ = ("data", "stand_in", "step")

    def __init__(self, data: Any, step: StepInfo, stand_in: Any = None) -> None:
        self.data = data
        self.step = step
        self.stand_in = stand_in
        """On an idle step a small batch as `collate_fn` makes it, for a rank to take part in collectives with; else None."""

    def __repr__(self) -> str:
        return f"ODBBatch(data={type(self.data).__name__}, step={self.step!r})"

    def pin_memory(self) -> ODBBatch:
        """The same with its tensors in pinned memory; torch's `DataLoader` calls it with `pin_memory=True`."""
        # Not public, but what that `DataLoader` does with a batch of any type, and nothing else does just the same.
        from torch.utils.data._utils.pin_memory import pin_memory

        return ODBBatch(self.data if self.step.is_idle else pin_memory(self.data), self.step, pin_memory(self.stand_in))

    def _not_data(self, *_: object) -> NoReturn:
        raise TypeError(
            "an ODBBatch was used as if it were the data. Under Lightning use an ODB strategy, which hands the plain batch "
            "to your hooks: Trainer(strategy='odb'), 'odb_ddp', 'odb_deepspeed_stage_1', '_2', '_3', 'odb_model_parallel' or "
            "'odb_fsdp' (import odb_lightning first); in a loop of your own use batch.data, or batch.stand_in where "
            "batch.step.is_idle, and scale the loss by batch.step.loss_multiplier()."
        )

    __getitem__ = __iter__ = __len__ = __contains__ = _not_data

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._not_data()
