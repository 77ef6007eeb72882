"""A LightningModule for any `AutoModelForCausalLM`: loss, metrics and a schedule that suit batches of varying size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from odb_lightning.callbacks.schedule import SampleSchedule, cosine_with_warmup
from odb_lightning.models.build import build_causal_lm, shard_layers
from odb_lightning.models.token_mean import TokenMean, TokenMetrics
from odb_lightning.runtime.counting import IGNORE_INDEX


class CausalLM(LightningModule):
    """Trains on dicts of `input_ids`, `attention_mask` and `labels`, each (samples, length), padded on the right.

    `training_step` returns the mean cross entropy over the supervised targets `labels[:, 1:] != -100`, a zero with a graph
    where there are none. The model comes from `config` (`model_type` and its options; random weights) or from `pretrained`;
    neither gives a small Qwen3. With `schedule_samples` the learning rate warms up over `warmup_samples` and falls along a
    cosine to `min_lr_ratio * lr` at that many samples over all ranks: the number of steps is not known beforehand.

    Logs `train_loss` (this rank's batch), `lr`, and over all targets of all ranks `train_loss_epoch`, `val_loss`,
    `val_perplexity` and `val_token_accuracy` (`test_...` in `trainer.test`). `trainer.predict` scores samples: see
    `predict_step`. Under `odb_model_parallel` each decoder layer is sharded (FSDP2).
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        pretrained: str | None = None,
        torch_dtype: str | None = None,
        attn_implementation: str | None = None,
        lora: Mapping[str, Any] | None = None,
        gradient_checkpointing: bool = False,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        schedule_samples: int | None = None,
        warmup_samples: int = 0,
        min_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = build_causal_lm(config, pretrained, torch_dtype, attn_implementation, lora, gradient_checkpointing)
        self.lr = lr
        self.weight_decay = weight_decay
        self.betas = (betas[0], betas[1])
        self.schedule_samples = schedule_samples
        self.warmup_samples = warmup_samples
        self.min_lr_ratio = min_lr_ratio
        self.train_loss_epoch = TokenMean()
        self.val_metrics = TokenMetrics()
        self.test_metrics = TokenMetrics()

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.model, FSDPModule):
            shard_layers(self.model, self.device_mesh["data_parallel"])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits of shape (samples, length, vocabulary)."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits  # type: ignore[no-any-return]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, targets = self._supervised(batch)
        loss = mean_cross_entropy(logits, targets)
        self.train_loss_epoch.update(loss.detach() * targets.numel(), targets.numel())
        self.log("train_loss", loss.detach(), prog_bar=True, on_step=True, on_epoch=False, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, targets = self._supervised(batch)
        self.val_metrics.update(cross_entropies(logits, targets), logits.argmax(-1) == targets)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, targets = self._supervised(batch)
        self.test_metrics.update(cross_entropies(logits, targets), logits.argmax(-1) == targets)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        """How likely the model finds each sample, in the order of the batch: `sample_ids` (None for a loader that does not
        tell), `loss` (samples,), the mean over the sample's targets, NaN where it has none, and `num_targets` (samples,)."""
        logits, targets = self._supervised(batch)
        is_target = batch["labels"][:, 1:] != IGNORE_INDEX
        losses = cross_entropies(logits, targets)
        sums = losses.new_zeros(len(is_target)).index_add_(0, is_target.nonzero()[:, 0], losses)
        num_targets = is_target.sum(1)
        step = getattr(self.trainer.strategy, "val_step_info", None)
        return {
            "sample_ids": None if step is None else list(step.sample_ids),
            "loss": sums / num_targets,
            "num_targets": num_targets,
        }

    # At the end of the epoch, not in the steps: every rank logs the same keys, also one that had no batch.
    def on_train_epoch_end(self) -> None:
        self.log("train_loss_epoch", self.train_loss_epoch)

    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val", self.val_metrics)

    def on_test_epoch_end(self) -> None:
        self._log_metrics("test", self.test_metrics)

    def _log_metrics(self, stage: str, metrics: TokenMetrics) -> None:
        self.log(f"{stage}_loss", metrics.loss, prog_bar=True)
        self.log(f"{stage}_perplexity", metrics.perplexity)
        self.log(f"{stage}_token_accuracy", metrics.token_accuracy)

    def _supervised(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (targets, vocabulary) and targets. Only these rows are copied and turned into float32, not the prompts'."""
        logits = self(batch["input_ids"], batch["attention_mask"])
        targets = batch["labels"][:, 1:]
        is_target = targets != IGNORE_INDEX
        return logits[:, :-1][is_target], targets[is_target]

    def configure_callbacks(self) -> Sequence[Callback]:
        if self.schedule_samples is None:
            return []
        return [SampleSchedule(cosine_with_warmup(self.schedule_samples, self.warmup_samples, self.min_lr_ratio))]

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.log("lr", optimizer.param_groups[0]["lr"], batch_size=1)

    def configure_optimizers(self) -> Optimizer:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [parameter for parameter in trainable if parameter.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [parameter for parameter in trainable if parameter.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=self.lr, betas=self.betas)


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over `targets` (n,) of `logits` (n, vocabulary), in float32; over none a zero that has a graph."""
    return F.cross_entropy(logits.float(), targets, reduction="sum") / max(targets.numel(), 1)


def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each of `targets` (n,) with its row of `logits` (n, vocabulary), in float32."""
    return F.cross_entropy(logits.float(), targets, reduction="none")
