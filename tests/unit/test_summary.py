"""The figures of a run, against figures computed by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from odb_lightning.batch import StepInfo
from odb_lightning.callbacks import AuditLog, Progress, RunSummary
from odb_lightning.callbacks.figures import METRICS, RankRecord, percentile, run_figures
from odb_lightning.callbacks.identities import IdentityAudit
from odb_lightning.run_report import RunReport, summary_table


def two_ranks() -> tuple[list[RankRecord], list[int], list[float]]:
    # Rank 0: lengths [10, 8], [9]; rank 1: [5, 5, 5] and an idle step. L_max = 20.
    first = RankRecord(
        steps=2,
        samples=3,
        samples_expected=4,
        tokens_real=27,
        tokens_padded=29,
        tokens_supervised=12,
        shapes={(2, 10), (1, 9)},
        train_seconds=2.0,
        wait_seconds=0.5,
        rounds=3,
        exchange_seconds=0.25,
        outstanding_depth=64,
        dropped={"empty": 1},
        lengths=3,
        length_sum=27,
        length_sum_squares=100 + 64 + 81,
        length_short=0,
        loss_sum=24.0,
        loss_weight=12,
        peak_memory_bytes=100,
    )
    second = RankRecord(
        steps=2,
        idle_steps=1,
        samples=3,
        samples_expected=3,
        tokens_real=15,
        tokens_padded=15,
        tokens_supervised=3,
        shapes={(3, 5), (1, 9)},
        train_seconds=1.5,
        wait_seconds=0.2,
        rounds=3,
        exchange_seconds=0.5,
        outstanding_depth=60,
        over_budget=1,
        lengths=3,
        length_sum=15,
        length_sum_squares=75,
        length_short=3,
        loss_sum=3.0,
        loss_weight=3,
        peak_memory_bytes=300,
    )
    return [first, second], [20, 9], [0.1, 0.3]


def test_figures_over_two_ranks_are_those_computed_by_hand() -> None:
    records, largest_padded, seconds = two_ranks()
    figures = run_figures(records, largest_padded, seconds, l_max=20)
    assert figures["padding"] == pytest.approx(2 / 44)
    assert figures["budget_fill"] == pytest.approx(42 / (2 * 2 * 20))
    assert figures["lockstep_efficiency"] == pytest.approx(44 / (2 * 29))
    assert figures["schedule_efficiency"] == pytest.approx(42 / (2 * 29))
    assert figures["samples_per_second"] == pytest.approx(6 / 2.0)
    assert figures["tokens_per_second"] == pytest.approx(42 / 2.0)
    assert figures["loader_wait_share"] == pytest.approx(0.7 / 3.5)
    assert figures["train_loss"] == pytest.approx(27 / 15)
    assert figures["length_cv"] == pytest.approx(np.std([10, 8, 9, 5, 5, 5]) / 7)
    assert figures["length_short_share"] == pytest.approx(0.5)
    assert figures["step_seconds"] == {"p50": 0.1, "p90": 0.3, "p99": 0.3}
    exact = {
        "steps": 2,
        "idle_steps": 1,
        "rounds": 3,
        "exchange_seconds": 0.5,
        "outstanding_depth": 64,
        "samples_emitted": 6,
        "samples_expected": 7,
        "dropped": {"empty": 1},
        "over_budget": 1,
        "tokens_real": 42,
        "tokens_padded": 44,
        "tokens_supervised": 15,
        "distinct_shapes": 3,
        "peak_memory_bytes": 300,
    }
    assert {name: figures[name] for name in exact} == exact


def test_a_run_without_a_step_has_no_shares_and_divides_by_nothing() -> None:
    figures = run_figures([RankRecord()], [], [], l_max=20)
    assert figures["steps"] == 0
    for name in ("padding", "budget_fill", "lockstep_efficiency", "length_cv", "train_loss", "loader_wait_share"):
        assert figures[name] is None


@pytest.mark.parametrize(("percent", "expected"), [(50, 5), (90, 9), (99, 10), (100, 10), (0, 1)])
def test_percentiles_are_values_that_occurred(percent: float, expected: float) -> None:
    assert percentile([float(value) for value in range(10, 0, -1)], percent) == expected


def merged(audits: list[IdentityAudit], expected: int | None = None) -> IdentityAudit:
    """The first audit after its epoch closed over all of them."""
    arrays = [[getattr(audit, name).copy() for audit in audits] for name in ("_emitted", "_dropped", "_done")]
    others: list[Any] = [(Counter(audit._others), set(audit._others_dropped), set(audit._others_done)) for audit in audits]
    sums = iter(np.sum(group, axis=0) for group in arrays)
    audits[0].close_epoch(lambda _: next(sums), lambda _: others, expected)
    return audits[0]


def test_the_audit_tells_missing_repeated_and_dropped_apart_over_ranks() -> None:
    first, second = IdentityAudit(6), IdentityAudit(6)
    first.emitted([0, 1, 1])
    second.emitted([1, np.int64(2)])
    second.dropped([3])
    audit = merged([first, second])
    assert (audit.missing, audit.repeated, audit.epochs) == (2, 2, 1)  # 4 and 5; 1 twice too often


def test_the_audit_counts_each_epoch_by_itself() -> None:
    audit = IdentityAudit(2)
    for _ in range(3):
        audit.emitted([0, 1])
        merged([audit])
    assert (audit.missing, audit.repeated, audit.epochs) == (0, 0, 3)


def test_the_audit_takes_identities_that_are_no_numbers() -> None:
    audit = IdentityAudit(None)
    audit.emitted(["a", "b", "b", True])
    audit.dropped(["c"])
    assert (merged([audit], expected=6).missing, audit.repeated) == (2, 1)


def test_the_audit_counts_what_was_done_before_an_epoch_was_resumed_once_whichever_ranks_name_it() -> None:
    for first, second in ((IdentityAudit(6), IdentityAudit(6)), (IdentityAudit(None), IdentityAudit(None))):
        for audit in (first, second):
            audit.done_before([0, 1])
        first.emitted([1, 2])
        second.emitted([3])
        audit = merged([first, second], expected=4)
        assert (audit.missing, audit.repeated) == (2, 1)  # 4 and 5; 1, which was done
        audit.emitted([0])
        merged([audit], expected=1)
        assert (audit.missing - 2, audit.repeated) == (0 if audit.size is None else 5, 1), "the next epoch is whole"


def step(lengths: list[int], supervised: int, step: int = 0, sample_ids: tuple[int, ...] = ()) -> StepInfo:
    longest = max(lengths, default=0)
    return StepInfo(
        epoch=0,
        step=step,
        is_idle=not lengths,
        sample_ids=sample_ids,
        num_samples=len(lengths),
        num_tokens_real=sum(lengths),
        num_tokens_padded=len(lengths) * longest,
        num_tokens_supervised=supervised,
        max_length=longest,
        global_num_samples=len(lengths),
        global_num_tokens_supervised=supervised,
        window_num_tokens_supervised=supervised,
        window_num_samples=len(lengths),
    )


class FakeTrainer(SimpleNamespace):
    """As much of a Trainer as the callbacks read."""

    def __init__(self, stats: Any = None, samples: int = 4) -> None:
        super().__init__(
            strategy=SimpleNamespace(root_device=torch.device("cpu"), step_info=None, optimizers=[], num_updates=2),
            datamodule=SimpleNamespace(train_dataset=range(samples), train_loader=SimpleNamespace(stats=stats)),
            accumulate_grad_batches=2,
            world_size=1,
            global_rank=0,
            is_global_zero=True,
            global_step=0,
            current_epoch=0,
            callback_metrics={},
            sanity_checking=False,
        )


def run_steps(trainer: FakeTrainer, callback: Any, steps: list[StepInfo], losses: list[float]) -> None:
    for number, (info, loss) in enumerate(zip(steps, losses, strict=True)):
        trainer.strategy.step_info = info
        callback.on_train_batch_start(trainer, None, None, number)
        # Lightning hands over the loss divided by the number of accumulated batches.
        callback.on_train_batch_end(trainer, None, {"loss": torch.tensor(loss / 2)}, None, number)


def test_the_callback_counts_the_steps_of_its_strategy() -> None:
    from odb_lightning.runtime.settings import LoaderStats

    stats = LoaderStats(views_expected=4, dropped={"oversize": 1}, dropped_ids=[3], rounds=2, outstanding_depth=9)
    stats.length_count, stats.length_sum, stats.length_sum_squares = 3, 30, 308
    trainer, module, summary = FakeTrainer(stats), torch.nn.Linear(3, 1), RunSummary(l_max=20)
    trainer.callback_metrics = {"val_loss": torch.tensor(7.0)}
    summary.on_fit_start(trainer, module)
    summary.on_sanity_check_end(trainer, module)
    trainer.callback_metrics = {"val_loss": torch.tensor(5.0)}
    summary.on_train_start(trainer, module)
    summary.on_train_epoch_start(trainer, module)
    steps = [step([10, 8], 6, 0, (0, 2)), step([12], 2, 1, (1,)), step([], 0, 2)]
    run_steps(trainer, summary, steps, [3.0, 1.0, float("nan")])
    summary.on_train_epoch_end(trainer, module)
    summary.on_train_end(trainer, module)
    figures = summary.figures
    assert (figures["steps"], figures["idle_steps"], figures["samples_emitted"], figures["epochs"]) == (3, 1, 3, 1)
    assert (figures["identities_missing"], figures["identities_repeated"]) == (0, 0)
    assert figures["train_loss"] == pytest.approx((3.0 * 6 + 1.0 * 2) / 8)
    assert (figures["val_loss_before"], figures["val_loss"]) == (7.0, 5.0)
    assert (figures["parameters"], figures["zero_stage"], figures["outstanding_depth"]) == (4, None, 9)
    assert figures["lockstep_efficiency"] == 1.0
    assert figures["train_seconds"] > 0
    assert set(METRICS) <= set(figures)


def test_the_loss_of_an_epoch_goes_on_from_a_checkpoint_without_the_window_that_is_begun_again() -> None:
    steps = [replace(step([5], 2, number, (number,)), accumulate=2) for number in range(4)]
    losses = [1.0, 2.0, 3.0, 4.0]
    trainer, module, before, after = FakeTrainer(), torch.nn.Linear(1, 1), RunSummary(), RunSummary()
    before.on_fit_start(trainer, module)
    before.on_train_start(trainer, module)
    before.on_train_epoch_start(trainer, module)
    run_steps(trainer, before, steps[:3], losses[:3])
    state = before.state_dict()
    assert state == {"loss_sum": 6.0, "loss_weight": 4.0}
    after.load_state_dict(state)
    after.on_fit_start(trainer, module)
    after.on_train_start(trainer, module)
    run_steps(trainer, after, steps[2:], losses[2:])
    after.on_train_epoch_end(trainer, module)
    after.on_train_end(trainer, module)
    assert after.figures["train_loss"] == pytest.approx(2.5) and after.figures["samples_emitted"] == 2


def test_a_strategy_without_step_information_is_refused_with_its_name() -> None:
    trainer, summary = FakeTrainer(), RunSummary()
    summary.on_fit_start(trainer, torch.nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="needs an ODB strategy"):
        run_steps(trainer, summary, [None], [1.0])  # type: ignore[list-item]


def test_the_audit_log_has_a_flushed_line_a_step(tmp_path) -> None:
    trainer, log = FakeTrainer(), AuditLog(tmp_path / "audit")
    log.on_train_start(trainer, None)
    run_steps(trainer, log, [step([1, 2], 1, 4, (8, 9)), step([], 0, 5)], [1.0, 1.0])
    lines = [json.loads(line) for line in (tmp_path / "audit" / "rank0.jsonl").read_text().splitlines()]
    log.teardown(trainer, None, "fit")
    assert lines == [
        {"epoch": 0, "step": 4, "update": 0, "sample_ids": [8, 9]},
        {"epoch": 0, "step": 5, "update": 0, "sample_ids": []},
    ]


def test_progress_shows_samples_of_the_epoch_and_never_more_than_all(capsys) -> None:
    trainer, progress = FakeTrainer(samples=4), Progress(seconds=0.0)
    progress.setup(trainer, None, "fit")
    progress.on_train_epoch_start(trainer, None)
    run_steps(trainer, progress, [step([10, 8], 6), step([5, 5], 2)], [3.0, 1.5])
    first, second = capsys.readouterr().err.splitlines()
    assert "2/4 samples (50%)" in first and "loss 3.000" in first
    assert "4/4 samples (100%)" in second and "padding 5.0%" not in first


def test_a_failed_run_has_a_summary_with_the_first_error(tmp_path) -> None:
    report = RunReport(tmp_path, {"task_name": "t"})
    report.failed(ValueError("the cause"))
    report.failed(RuntimeError("what followed"))
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["status"], written["error"], written["task_name"]) == ("failed", "ValueError: the cause", "t")


def test_a_run_stopped_by_ctrl_c_is_interrupted_though_the_trainer_exits(tmp_path) -> None:
    report = RunReport(tmp_path, {})
    report.failed(KeyboardInterrupt())
    report.failed(SystemExit(1))
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"


def test_a_dead_rank_is_noted_and_its_rank_zero_error_wins(tmp_path) -> None:
    report = RunReport(tmp_path, {})
    report.rank_failed(1, -9)
    assert "rank 1 ended with status -9" in json.loads((tmp_path / "summary.json").read_text())["error"]
    report.failed(RuntimeError("connection closed"))
    assert json.loads((tmp_path / "summary.json").read_text())["error"] == "RuntimeError: connection closed"


def test_the_table_for_people_leaves_out_what_is_unknown() -> None:
    from rich.console import Console

    console = Console(record=True, width=100)
    console.print(summary_table({"val_loss": 4.25, "steps": 3, "epochs": 1, "updates": 2}))
    text = console.export_text()
    assert "4.2500" in text and "1 / 3 / 2" in text and "padding" in text
