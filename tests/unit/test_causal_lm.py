"""The language model: its loss, its metrics and its learning rate by samples."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torchmetrics.text import Perplexity

from odb_lightning.data import PadCollator
from odb_lightning.models import CausalLM
from odb_lightning.models.token_mean import TokenMean
from tests.multiprocess.trainers import schedule_of

# Lightning's own use of torch's pytree
pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
TINY = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
collate = PadCollator(pad_id=0)


def samples(count: int, masked: int = 2) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    drawn = []
    for index in range(count):
        ids = torch.randint(1, 40, (4 + 3 * index % 11,), generator=generator)
        drawn.append({"input_ids": ids, "labels": torch.cat([torch.full((masked,), -100), ids[masked:]])})
    return drawn


def tiny(**options) -> CausalLM:
    seed_everything(0, verbose=False)
    return CausalLM(TINY, **options)


def loss_of(module: CausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return module.training_step(batch, 0)


def trainer(**options) -> Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return Trainer(accelerator="cpu", devices=1, num_sanity_val_steps=0, **{**quiet, "max_epochs": 1, **options})


class Batches:
    """An iterable of `data` in batches of `size`: a list would be several loaders for Lightning."""

    def __init__(self, data: list, size: int) -> None:
        self.batches = [collate(data[start : start + size]) for start in range(0, len(data), size)]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def reference(module: CausalLM, drawn: list) -> tuple[float, int]:
    """Sum over targets and their number, one sample at a time, without padding, in float64."""
    total, count = 0.0, 0
    for sample in drawn:
        ids, labels = sample["input_ids"], sample["labels"]
        logits = module.model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        for position in range(1, len(ids)):
            if labels[position] != -100:
                total -= logits[position - 1, labels[position]].item()
                count += 1
    return total, count


def test_the_loss_is_the_mean_over_targets_of_samples_taken_alone():
    module, drawn = tiny(), samples(6)
    total, count = reference(module, drawn)
    assert count == sum(len(sample["input_ids"]) - 2 for sample in drawn)
    assert loss_of(module, collate(drawn)).item() == pytest.approx(total / count, abs=1e-5)


def test_grouped_samples_have_the_loss_and_the_gradient_they_have_alone():
    module, drawn = tiny(), samples(5)
    loss_of(module, collate(drawn)).backward()
    grouped = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    count = sum(len(sample["input_ids"]) - 2 for sample in drawn)
    for sample in drawn:
        alone = loss_of(module, collate([sample]))
        assert alone.item() == pytest.approx(reference(module, [sample])[0] / (len(sample["input_ids"]) - 2), abs=1e-5)
        (alone * (len(sample["input_ids"]) - 2) / count).backward()
    for together, parameter in zip(grouped, module.parameters(), strict=True):
        torch.testing.assert_close(together, parameter.grad, atol=1e-5, rtol=1e-4)


def test_a_batch_without_targets_gives_a_zero_and_zero_gradients():
    module = tiny()
    batch = collate(samples(3))
    batch["labels"][:, 1:] = -100  # column 0 is no target of a causal model
    loss = loss_of(module, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in module.parameters())


def test_metrics_are_weighted_by_targets_and_begin_anew_each_epoch():
    drawn, module = samples(7), tiny(lr=0.0)
    drawn[3]["labels"][:] = -100
    total, count = reference(module, drawn)
    seen = []
    module.on_fit_end = lambda: seen.append(dict(module.trainer.callback_metrics))  # type: ignore[method-assign]
    trainer(max_epochs=2).fit(module, Batches(drawn, 3), Batches(drawn, 2))
    (metrics,) = seen
    assert metrics["val_loss"].item() == pytest.approx(total / count, abs=1e-5)
    assert metrics["train_loss_epoch"].item() == pytest.approx(total / count, abs=1e-5)
    assert metrics["val_loss"].dtype == torch.float64
    hits = [
        (module(**{k: v for k, v in collate([s]).items() if k != "labels"})[0, :-1].argmax(-1) == s["labels"][1:]).sum().item()
        for s in drawn
    ]
    assert metrics["val_token_accuracy"].item() == pytest.approx(sum(hits) / count)
    assert metrics["val_perplexity"].item() == pytest.approx(math.exp(total / count), rel=1e-5)


def test_perplexity_is_that_of_torchmetrics():
    module, batch = tiny(), collate(samples(5))
    theirs = Perplexity(ignore_index=-100)
    theirs.update(module(batch["input_ids"], batch["attention_mask"])[:, :-1].detach(), batch["labels"][:, 1:])
    trainer().validate(module, Batches(samples(5), 2), verbose=False)
    assert module.trainer.callback_metrics["val_perplexity"].item() == pytest.approx(theirs.compute().item(), rel=1e-5)


def test_testing_measures_what_validation_does():
    fit, module = trainer(), tiny()
    (validated,) = fit.validate(module, Batches(samples(7), 3), verbose=False)
    (tested,) = fit.test(module, Batches(samples(7), 2), verbose=False)
    assert {name.replace("val_", "test_"): pytest.approx(value) for name, value in validated.items()} == tested
    assert len(tested) == 3


def test_predictions_are_the_mean_losses_of_samples():
    drawn, module = samples(5), tiny()
    drawn[3]["labels"][1:] = -100
    predictions = trainer().predict(module, Batches(drawn, 2))
    assert [prediction["sample_ids"] for prediction in predictions] == [None] * 3  # only an ODB loader tells
    losses = torch.cat([prediction["loss"] for prediction in predictions])
    assert torch.cat([prediction["num_targets"] for prediction in predictions]).tolist() == [
        int((sample["labels"][1:] != -100).sum()) for sample in drawn
    ]
    for loss, sample in zip(losses, drawn, strict=True):
        total, count = reference(module, [sample])
        assert loss.isnan() if count == 0 else loss.item() == pytest.approx(total / count, abs=1e-5)


def test_in_half_precision_targets_are_counted_as_in_full():
    """Lightning turns the whole module into bfloat16, in which 257 is 256."""
    drawn = samples(70)
    module = tiny(lr=0.0)
    trainer(precision="bf16-true").fit(module, Batches(drawn, 3), Batches(drawn, 3))
    assert module.dtype == torch.bfloat16
    total, count = reference(tiny(), drawn)
    assert count > 257
    metrics = module.trainer.callback_metrics
    assert metrics["val_loss"].item() == pytest.approx(total / count, rel=2e-3)
    assert metrics["train_loss_epoch"].item() == pytest.approx(metrics["val_loss"].item(), rel=1e-6)


def test_the_learning_rate_ends_at_the_same_value_for_every_batching():
    ends = []
    for size in (1, 2, 3, 5):
        module = tiny(lr=0.1, schedule_samples=22, warmup_samples=4, min_lr_ratio=0.2)
        fit = trainer(max_epochs=2)
        fit.fit(module, Batches(samples(11), size), Batches(samples(2), 2))
        ends.append((schedule_of(fit).samples, fit.optimizers[0].param_groups[0]["lr"], fit.callback_metrics["lr"].item()))
    assert ends == [(22, pytest.approx(0.02), pytest.approx(0.02))] * 4


def test_the_learning_rate_is_constant_without_a_schedule():
    module, fit = tiny(lr=0.1), trainer()
    fit.fit(module, Batches(samples(5), 2), Batches(samples(2), 2))
    assert fit.optimizers[0].param_groups[0]["lr"] == 0.1


def test_the_learning_rate_goes_on_from_a_checkpoint(tmp_path):
    data, options = samples(7), {"lr": 0.1, "schedule_samples": 14}
    first, module = trainer(accumulate_grad_batches=2), tiny(**options)
    first.fit(module, Batches(data, 2), Batches(data, 4))
    first.save_checkpoint(tmp_path / "last.ckpt")
    assert (schedule_of(first).samples, first.callback_metrics["lr"].item()) == (7, pytest.approx(0.055))
    again = trainer(max_epochs=2)
    again.fit(tiny(**options), Batches(data, 2), Batches(data, 4), ckpt_path=tmp_path / "last.ckpt")
    assert (schedule_of(again).samples, again.callback_metrics["lr"].item()) == (14, pytest.approx(0.01))


def test_vectors_are_not_decayed_and_frozen_weights_are_not_optimized():
    module = tiny(weight_decay=0.3)
    module.model.model.layers[0].requires_grad_(False)
    matrices, vectors = module.configure_optimizers().param_groups
    assert matrices["weight_decay"] == 0.3 and vectors["weight_decay"] == 0.0
    assert all(p.ndim > 1 for p in matrices["params"]) and all(p.ndim == 1 for p in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == sum(p.requires_grad for p in module.parameters())


def test_any_architecture_and_pretrained_weights_fit(tmp_path):
    gpt2 = CausalLM({"model_type": "gpt2", "vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2})
    assert loss_of(gpt2, collate(samples(3))).isfinite()
    module = tiny()
    module.model.save_pretrained(tmp_path)
    loaded = CausalLM(pretrained=str(tmp_path), attn_implementation="eager", gradient_checkpointing=True)
    assert loaded.model.training
    batch = collate(samples(4))
    torch.testing.assert_close(loss_of(loaded, batch), loss_of(module, batch), atol=1e-5, rtol=0)
    assert CausalLM(pretrained=str(tmp_path), torch_dtype="bfloat16").model.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
def test_lora_adds_adapters_to_all_linear_layers_and_trains_nothing_else():
    pytest.importorskip("peft")
    base = tiny()
    adapted = tiny(lora={"r": 8, "target_modules": "all-linear"}, gradient_checkpointing=True)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 7  # A and B, two layers, four projections of attention and three of the MLP
    assert all("lora_" in name for name in trained)
    batch = collate(samples(4))
    loss = loss_of(adapted, batch)
    torch.testing.assert_close(loss, loss_of(base, batch), atol=1e-5, rtol=0)  # B is zero at first
    loss.backward()
    matrices, *others = adapted.configure_optimizers().param_groups
    assert len(matrices["params"]) == len(trained) and not others
    assert all(parameter.grad is not None for parameter in matrices["params"])


def test_what_is_wrong_with_the_options_is_said(monkeypatch):
    with pytest.raises(ValueError, match="leave one out"):
        CausalLM(TINY, pretrained="x")
    with pytest.raises(ValueError, match="no model_type"):
        CausalLM({"hidden_size": 3})
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install .odb-lightning\[peft\]"):
        CausalLM(TINY, lora={"r": 2})


def test_a_token_mean_counts_past_what_float32_can_and_keeps_a_nan():
    metric = TokenMean()
    metric.update(torch.tensor(2.0 * 2**25), 2**25)
    for _ in range(3):
        metric.update(torch.tensor(0.0), 1)
    assert metric.half().count.item() == metric.to(torch.bfloat16).count.item() == 2**25 + 3
    metric.update(torch.tensor(float("nan")), 1)
    assert metric.compute().isnan()
