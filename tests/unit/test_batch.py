"""The wrapper of a batch: the exact loss multiplier, and no way to train on the wrapper by mistake."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data._utils.pin_memory import pin_memory

from odb_lightning.batch import IDLE_DATA, ODBBatch, StepInfo

STEP = StepInfo(
    epoch=0,
    step=3,
    is_idle=False,
    sample_ids=(4, "a"),
    num_samples=2,
    num_tokens_real=9,
    num_tokens_padded=10,
    num_tokens_supervised=6,
    max_length=5,
    global_num_samples=3,
    global_num_tokens_supervised=8,
    window_num_tokens_supervised=24,
    window_num_samples=12,
    world_size=2,
    accumulate=3,
)


def micro_batch(n: float, window: float, world_size: int, accumulate: int = 1) -> StepInfo:
    return replace(
        STEP, num_tokens_supervised=n, window_num_tokens_supervised=window, world_size=world_size, accumulate=accumulate
    )


@pytest.mark.parametrize(
    ("targets", "means", "world_size", "accumulate", "multipliers", "loss"),
    [
        pytest.param([1, 7], [4.0, 1.0], 2, 1, [0.25, 1.75], 1.375, id="C28-few-targets-on-one-rank"),
        pytest.param([10, 60], [1.0, 3.0], 2, 1, [2 / 7, 12 / 7], 190 / 70, id="C29-supervised-not-input-tokens"),
        pytest.param([9, 1], [2.0, 8.0], 1, 2, [1.8, 0.2], 2.6, id="C31-window-mean-not-mean-of-means"),
        pytest.param([0, 5], [0.0, 3.0], 2, 1, [0.0, 2.0], 3.0, id="C34-no-target-on-one-rank"),
        pytest.param([6, 0], [3.0, 0.0], 2, 1, [2.0, 0.0], 3.0, id="C17-idle-peer"),
        pytest.param([2], [5.0], 1, 4, [4.0], 5.0, id="C32-short-last-window-divided-by-full-k"),
        pytest.param([3, 1, 4, 2], [1.0, 2.0, 3.0, 4.0], 2, 2, [1.2, 0.4, 1.6, 0.8], 2.5, id="two-ranks-two-micro-batches"),
    ],
)
def test_token_multiplier(
    targets: list[int], means: list[float], world_size: int, accumulate: int, multipliers: list[float], loss: float
) -> None:
    """The trainer divides each loss by `accumulate` and averages over ranks; the sum is then the mean over all targets."""
    steps = [micro_batch(n, sum(targets), world_size, accumulate) for n in targets]
    assert [step.loss_multiplier() for step in steps] == pytest.approx(multipliers, abs=1e-12)
    scaled = [step.loss_multiplier("token") * mean for step, mean in zip(steps, means, strict=True)]
    assert sum(scaled) / (world_size * accumulate) == pytest.approx(loss)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(-5, 5)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_the_scaled_losses_add_up_to_the_mean_over_all_targets(
    window: list[tuple[int, float]], world_size: int, accumulate: int
) -> None:
    total = sum(n for n, _ in window)
    steps = [micro_batch(n, total, world_size, accumulate) for n, _ in window]
    scaled = sum(step.loss_multiplier() * mean for step, (_, mean) in zip(steps, window, strict=True))
    expected = sum(n * mean for n, mean in window) / total if total else 0.0
    assert scaled / (world_size * accumulate) == pytest.approx(expected, abs=1e-9)


def test_sample_multiplier_counts_samples_of_the_window() -> None:
    assert STEP.loss_multiplier("sample") == 2 * 3 * 2 / 12
    assert replace(STEP, num_samples=0).loss_multiplier("sample") == 0.0


def test_no_scaling_leaves_a_loss_alone_but_not_that_of_an_idle_step() -> None:
    assert STEP.loss_multiplier("none") == 1.0
    assert replace(STEP, is_idle=True).loss_multiplier("none") == 0.0


@pytest.mark.parametrize("mode", ["token", "sample"])
def test_a_window_without_targets_does_not_divide_by_zero(mode: Any) -> None:
    empty = replace(
        STEP, num_tokens_supervised=0, window_num_tokens_supervised=0, num_samples=0, window_num_samples=0, is_idle=True
    )
    assert empty.loss_multiplier(mode) == 0.0


def test_weighted_targets_may_be_fractions() -> None:
    assert micro_batch(0.5, 2.0, 2).loss_multiplier() == 0.5


def test_an_unknown_mode_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'token', 'sample' or 'none'"):
        STEP.loss_multiplier("tokens")  # type: ignore[arg-type]


def test_step_info_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        STEP.step = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda batch: batch["input_ids"], id="mapping"),
        pytest.param(lambda batch: batch[0], id="sequence"),
        pytest.param(lambda batch: iter(batch), id="iter"),
        pytest.param(lambda batch: list(batch), id="list"),
        pytest.param(lambda batch: [*batch], id="unpack"),
        pytest.param(lambda batch: dict(**batch), id="keywords"),
        pytest.param(lambda batch: len(batch), id="len"),
        pytest.param(lambda batch: "input_ids" in batch, id="in"),
        pytest.param(lambda batch: batch.input_ids, id="attribute"),
        pytest.param(lambda batch: batch.to("cpu"), id="to"),
        pytest.param(lambda batch: batch.items(), id="items"),
    ],
)
def test_use_as_data_raises_with_the_mend(use: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"strategy='odb'.*batch\.data"):
        use(ODBBatch({"input_ids": [1]}, STEP))


def test_a_batch_is_what_it_was_given() -> None:
    data, stand_in = {"x": 1}, {"x": 0}
    batch = ODBBatch(data, STEP, stand_in)
    assert batch.data is data
    assert batch.step is STEP
    assert batch.stand_in is stand_in
    assert ODBBatch(data, STEP).stand_in is None
    assert "data=dict" in repr(batch)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_the_sentinel_the_only_one(protocol: int) -> None:
    batch = pickle.loads(pickle.dumps(ODBBatch(IDLE_DATA, STEP, stand_in=[1]), protocol))
    assert batch.data is IDLE_DATA
    assert batch.step == STEP
    assert batch.stand_in == [1]


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_the_sentinel_has_no_copies_and_is_false(clone: Callable[[Any], Any]) -> None:
    assert clone(IDLE_DATA) is IDLE_DATA
    assert not IDLE_DATA
    assert repr(IDLE_DATA) == "IDLE_DATA"


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy])
def test_a_batch_can_be_copied(clone: Callable[[ODBBatch], ODBBatch]) -> None:
    twin = clone(ODBBatch([1, 2], STEP))
    assert (twin.data, twin.step, twin.stand_in) == ([1, 2], STEP, None)


class DictWithMeta(dict[str, Any]):
    """A batch of a user's own type, with an attribute."""

    meta = "none"


class PinsItself:
    """A batch that knows how it is pinned, as torch asks for."""

    def __init__(self, is_pinned: bool = False) -> None:
        self.is_pinned = is_pinned

    def pin_memory(self) -> PinsItself:
        return PinsItself(is_pinned=True)


@pytest.mark.parametrize("data", [{"input_ids": [1]}, IDLE_DATA, "text"])
def test_torch_can_pin_a_batch(data: Any) -> None:
    pinned = pin_memory(ODBBatch(data, STEP, stand_in={"input_ids": [2]}))
    assert isinstance(pinned, ODBBatch)
    assert pinned.data == data
    assert pinned.step is STEP
    assert pinned.stand_in == {"input_ids": [2]}


def test_pinning_keeps_the_type_and_the_attributes_of_the_data() -> None:
    data = DictWithMeta(input_ids=[1])
    data.meta = "kept"
    pinned = pin_memory(ODBBatch(data, STEP)).data
    assert (type(pinned), pinned, pinned.meta) == (DictWithMeta, {"input_ids": [1]}, "kept")


def test_data_that_can_pin_itself_is_asked_to() -> None:
    assert pin_memory(ODBBatch(PinsItself(), STEP)).data.is_pinned
    assert pin_memory(ODBBatch({"graph": PinsItself()}, STEP)).data["graph"].is_pinned
