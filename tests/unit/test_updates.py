"""Updates are counted where they are made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odb_lightning.callbacks.updates import UpdateCounter


def started(**strategy: Any) -> UpdateCounter:
    counter = UpdateCounter()
    counter.start(SimpleNamespace(strategy=SimpleNamespace(**strategy)))  # type: ignore[arg-type]
    return counter


def make_optimizer(**options: Any) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.AdamW([parameter], lr=0.1, **options)


def test_steps_of_all_optimizers_count_from_the_start_to_the_stop() -> None:
    one, two = make_optimizer(), make_optimizer()
    one.step()
    counter = started(optimizers=[one, two])
    for optimizer in (one, two, one):
        optimizer.step()
    assert counter.count == 3
    counter.stop()
    one.step()
    assert counter.count == 3


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_with_an_overflow_does_not_count(fused: bool) -> None:
    """The scaler skips it; it leaves that to an optimizer that is fused."""
    optimizer = make_optimizer(fused=fused)
    counter, scaler = started(optimizers=[optimizer]), torch.amp.GradScaler("cpu", init_scale=1.0)
    (parameter,) = optimizer.param_groups[0]["params"]
    for gradient in (1.0, float("inf"), 1.0):
        scaler.scale(torch.ones(()))  # or the scaler has no scale yet
        parameter.grad = torch.full((2,), gradient)
        scaler.step(optimizer)
        scaler.update()
    assert parameter.isfinite().all()
    assert counter.count == 2


def test_of_deepspeed_the_engines_own_count_is_taken() -> None:
    engine = SimpleNamespace(global_steps=7, skipped_steps=2)
    counter = started(deepspeed_engine=engine, optimizers=[make_optimizer()])
    engine.global_steps, engine.skipped_steps = 12, 3
    assert counter.count == 4
    counter.stop()
    engine.global_steps = 20
    assert counter.count == 4


def test_a_counter_begins_anew() -> None:
    optimizer = make_optimizer()
    counter = started(optimizers=[optimizer])
    optimizer.step()
    counter.start(SimpleNamespace(strategy=SimpleNamespace(optimizers=[optimizer])))  # type: ignore[arg-type]
    optimizer.step()
    assert counter.count == 1
