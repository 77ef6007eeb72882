"""Fits of adapters and of partly frozen models, run by every rank (see ranks.py), against one process in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from odb_lightning.models import CausalLM
from tests.multiprocess.evaluation_cases import TINY, pad_with_mask
from tests.multiprocess.fitting import Shard, fit
from tests.multiprocess.training_cases import Samples, make_sample

LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}

# By epoch: rank 1 is idle at step 0 and has samples later, or one of the ranks never has any.
FIRST_IDLE: list[Shard] = [[[0, 1], [3]], [[], [10, 13]]]
NEVER: list[Shard] = [[[], []], [[0, 1], [3, 4]]]

CASES: dict[str, dict[str, Any]] = {
    "lora, rank 1 idle at step 0": {"shards": FIRST_IDLE, "lora": LORA},
    "lora, a rank that never has a sample, checkpointing": {
        "shards": NEVER,
        "lora": LORA,
        "checkpointing": "not reentrant",
    },
    "lora, rank 0 idle at step 0, k=2, reentrant checkpointing": {
        "shards": FIRST_IDLE[::-1],
        "lora": LORA,
        "checkpointing": "reentrant",
        "accumulate": 2,
    },
    "frozen, rank 1 idle at step 0": {"shards": FIRST_IDLE},
    "frozen, a rank that never has a sample, checkpointing": {"shards": NEVER, "checkpointing": "not reentrant"},
}


class Adapted(CausalLM):
    """With plain gradient descent, which does not blow up what is rounding."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trainable, lr=0.5, momentum=0.9)


def make_module(lora: dict[str, Any] | None, checkpointing: str | None) -> Adapted:
    """Without `lora` all but the last layer and the head's norm is frozen, the embeddings included."""
    torch.manual_seed(0)
    module = Adapted(config=TINY, lora=lora, gradient_checkpointing=checkpointing == "not reentrant")
    if lora is None:
        module.requires_grad_(False)
        module.model.model.layers[-1].requires_grad_(True)
        module.model.model.norm.requires_grad_(True)
    if checkpointing == "reentrant":
        enable = getattr(module.model, "activation_checkpointing_enable", None) or module.model.gradient_checkpointing_enable
        enable({"use_reentrant": True})
        module.model.enable_input_require_grads()
    return module


WITHOUT_LIKE = [
    "lora, rank 1 idle at step 0",
    "lora, rank 0 idle at step 0, k=2, reentrant checkpointing",
    "frozen, a rank that never has a sample, checkpointing",
]


def cases_under(strategy: str) -> list[str]:
    """All under DDP, ZeRO 2 and FSDP2; elsewhere, those that have no like."""
    return list(CASES) if strategy in ("ddp", "zero2", "fsdp2") else WITHOUT_LIKE


def all_cases(strategy: str) -> dict[str, Any]:
    return {name: _case(strategy, **CASES[name]) for name in cases_under(strategy)}


def _case(
    strategy: str,
    shards: list[Shard],
    lora: dict[str, Any] | None = None,
    checkpointing: str | None = None,
    accumulate: int = 1,
) -> dict[str, Any]:
    if strategy == "single":  # with the samples of both, and updates of several batches for want of ranks
        shards, accumulate = [[first + second for first, second in zip(*shards, strict=True)]], 2
    module = make_module(lora, checkpointing)
    initial, is_trainable = _flat(module), _trainable(module)
    runs: list[int] = []
    (layer,) = (part for name, part in module.named_modules() if name.endswith("layers.1.mlp"))
    layer.register_forward_pre_hook(lambda *_: runs.append(1))
    done = fit(module, strategy, shards, Samples(), pad_with_mask, accumulate=accumulate)
    expected = _reference(lora, done.windows)
    moved = (done.final != initial).double()
    return {
        "error": done.error(expected, initial),
        "spread": done.spread,
        "is_idle": done.is_idle,
        "updates": len(done.windows),
        "runs_per_step": len(runs) / sum(map(len, done.is_idle)),
        "frozen": int((~is_trainable).sum()),
        "frozen_moved": float(moved[~is_trainable].sum()),
        "trainable_moved": float(moved[is_trainable].mean()),
    }


def _reference(lora: dict[str, Any] | None, windows: list[list[int]]) -> Tensor:
    """The parameters after the same updates, sample by sample, without padding or checkpointing."""
    module = make_module(lora, None).double()
    optimizer = module.configure_optimizers()
    for window in windows:
        batches = [pad_with_mask([make_sample(index)]) for index in window]
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        optimizer.zero_grad()
        for batch in batches:
            logits = module.model(input_ids=batch["input_ids"]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:], reduction="sum")
            (losses / count).backward()
        optimizer.step()
    return _flat(module)


def _flat(module: CausalLM) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])


def _trainable(module: CausalLM) -> Tensor:
    return torch.cat([torch.full((parameter.numel(),), parameter.requires_grad) for parameter in module.parameters()])
