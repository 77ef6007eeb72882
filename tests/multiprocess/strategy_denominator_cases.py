"""Fits in which the strategy itself counts what the loss is a mean over, run by every rank (see ranks.py)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler

from tests.multiprocess.exact_fits import (
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

# Of unequal sizes and lengths; samples 5 and 6 have no target.
RANK_0 = [[7], [9, 8, 11], [3, 2, 1], [0, 4, 10], [12], [13, 5]]
RANK_1 = [[10, 12, 13], [7, 9], [1], [5], [0, 4, 13, 12], [2]]
BATCHES = [RANK_0, RANK_1]

CASES: dict[str, dict[str, Any]] = {
    "k=1": {"batches": [RANK_0[:5], RANK_1[:5]], "max_epochs": 2},
    "k=2, a short last window of unknown length": {
        "batches": [RANK_0[:5], RANK_1[:5]],
        "accumulate": 2,
        "max_epochs": 2,
        "is_sized": False,
    },
    "k=4, a short last window, clipped": {"batches": BATCHES, "accumulate": 4, "clip": 0.1, "max_epochs": 2},
    "a limit inside a window": {"batches": BATCHES, "accumulate": 4, "limit": 3, "max_epochs": 2},
    "a limit above the steps of an epoch": {
        "batches": BATCHES,
        "accumulate": 4,
        "limit": 9,
        "max_epochs": 2,
        "is_sized": False,
    },
    "max_steps": {"batches": BATCHES, "accumulate": 2, "max_steps": 4, "max_epochs": -1},
    "windows with and without targets": {
        "batches": [[[5], [6], [0], [5]], [[6], [5], [6], [6, 5]]],
        "accumulate": 2,
        "max_epochs": 2,
    },
}
WRONG = {"none": {"batches": BATCHES, "accumulate": 2, "options": {"loss_scaling": "none", "denominator": "loader"}}}


def _fit(
    strategy: str,
    batches: list[list[list[int]]],
    accumulate: int = 1,
    clip: float | None = None,
    limit: int | None = None,
    is_sized: bool = True,
    options: dict[str, Any] | None = None,
    model: Model | None = None,
    **trainer: Any,
) -> dict[str, Any]:
    model = model or Model(shard=shard_for(strategy))
    if options == WRONG["none"]["options"]:
        # Without counts there is no step_info, either.
        model.on_train_batch_end = lambda outputs, batch, step: model.steps.append((0, step, batch["index"].tolist()))
    done = fit(
        make(strategy, **({"denominator": "strategy"} | (options or {}))),
        model,
        plain_loader(batches, is_sized),
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        limit_train_batches=limit,
        **({"devices": num_ranks(strategy)} | trainer),
    )
    return outcome(done, model, accumulate=accumulate, clip=clip)


def all_cases(strategy: str) -> dict[str, Any]:
    """One fit after the other in the same processes; on one device, with the batches of rank 0."""
    return {name: _fit(strategy, **case) for name, case in (CASES | WRONG).items()}


def four_ranks() -> dict[str, Any]:
    return _fit("ddp", [*BATCHES, BATCHES[0][::-1], [[index] for index in range(6)]], accumulate=4, devices=4)


def more_cases() -> dict[str, Any]:
    """What does not depend on how gradients are exchanged, under DDP."""
    two = {"batches": [RANK_0[:5], [[1], [0], *RANK_1[:3]]], "accumulate": 2}
    results = {
        "samples": _fit("ddp", **two, options={"loss_scaling": "sample"}, model=Model(per_sample)),
        "samples without labels": _fit(
            "ddp", **two, options={"num_supervised_fn": lambda batch: len(batch["index"])}, model=Model(per_sample)
        ),
        "unshifted": _fit("ddp", **two, options={"num_supervised_fn": "unshifted"}, model=Model(unshifted)),
        "weighted": _fit(
            "ddp", **two, options={"num_supervised_fn": lambda batch: target_weights(batch).sum()}, model=Model(weighted)
        ),
        "a sum": _fit("ddp", **two, options={"loss_reduction": "sum"}, model=Model(returns=lambda total, _: total)),
        "an ODBDataLoader": _with_odb_loader(),
        "scheduled": _scheduled(),
    }
    refusals = {
        "unequal": refusal(lambda: _fit("ddp", [RANK_0, RANK_1[:5]])),
        "unequal, of unknown length": refusal(lambda: _fit("ddp", [RANK_0[:3], RANK_1[:2]], is_sized=False)),
        "a failing loader": refusal(lambda: _fit("ddp", [RANK_0, [*RANK_1[:3], [99], *RANK_1[:2]]])),
    }
    return results | refusals


def _with_odb_loader() -> dict[str, Any]:
    model = Model()
    loader = odb_loader([[0, 1, 2, 3, 4, 8], [10, 7]])
    return outcome(fit(make("ddp", denominator="strategy"), model, loader, accumulate_grad_batches=4), model, accumulate=4)


def _scheduled() -> dict[str, Any]:
    model, scheduler = Model(), GradientAccumulationScheduler({0: 3, 1: 1, 2: 2})
    trainer = fit(make("ddp", denominator="strategy"), model, plain_loader(BATCHES), max_epochs=3, callbacks=[scheduler])
    return outcome(trainer, model, accumulate=scheduler.get_accumulate_grad_batches)
