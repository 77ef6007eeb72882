"""Planning on integers alone: lengths and counts in, groups of positions out. No processes, no torch, no I/O."""

from odb_lightning.plan.accumulation import AccumulationWindows, exchange_blocks
from odb_lightning.plan.alignment import align_groups, target_group_count
from odb_lightning.plan.baselines import fixed_batch_steps, oracle_steps
from odb_lightning.plan.costs import QuadraticCost, RowCost, RowLimits
from odb_lightning.plan.grouping import group_window
from odb_lightning.plan.protocol import Outcome, RankReport, RoundDecision, decide_round, encode_report
from odb_lightning.plan.rounds import ALIGNMENTS, Alignment, RoundPlan, RoundPlanner
from odb_lightning.plan.simulation import SimulatedRun, simulate_ranks

__all__ = [
    "ALIGNMENTS",
    "AccumulationWindows",
    "Alignment",
    "Outcome",
    "QuadraticCost",
    "RankReport",
    "RoundDecision",
    "RoundPlan",
    "RoundPlanner",
    "RowCost",
    "RowLimits",
    "SimulatedRun",
    "align_groups",
    "decide_round",
    "encode_report",
    "exchange_blocks",
    "fixed_batch_steps",
    "group_window",
    "oracle_steps",
    "simulate_ranks",
    "target_group_count",
]
