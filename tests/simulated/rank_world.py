"""Ranks that each go their own way between two reductions, and wait in them for all others, as real ones do."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from paper_protocol import naive_groups
from rank_cases import MATCHED, ObservedPlanner, Rules, patches_of

from odb_lightning.plan import (
    AccumulationWindows,
    Outcome,
    RoundPlan,
    RoundPlanner,
    exchange_blocks,
    matching,
    simulate_ranks,
    target_group_count,
)
from odb_lightning.plan.accumulation import SummedStep
from odb_lightning.plan.protocol import INF, REPORT_SIZE


@dataclass(frozen=True)
class Setup:
    passes: list[list[list[int]]]
    """`passes[r]`: the lengths of rank r's views in one pass after another, then again from the first."""
    l_max: int
    buffer_size: int
    max_rows: int | None = None
    order_seed: str | None = None
    joins: bool = True
    quota: int | None = None
    accumulate: int = 1
    max_steps: int | None = None
    at_least: int = 1
    """Steps in a block of `exchange_blocks`."""
    rules: Rules = MATCHED

    @property
    def report_size(self) -> int:
        """Integers that a rank gives in each round."""
        return REPORT_SIZE + (1 + matching.NUM_QUANTILES if self.rules.alignment == "matched" else 0)

    @property
    def depth(self) -> int:
        """D. Output slots run out on an unfinished rank in at most so many rounds of an epoch."""
        return self.buffer_size

    @property
    def most_rounds(self) -> int:
        """Join: max shard + D + 1, since a round that emits takes a view from every unfinished rank, and the last one ends
        the epoch. Non-join: 2 * quota + D, since a pass that ends has emitted; one more if a pass is empty on all ranks."""
        if self.joins:
            return max(len(passes[0]) for passes in self.passes) + self.depth + 1
        assert self.quota is not None
        return 2 * self.quota + self.depth + 1


@dataclass
class Reduction:
    """A blocking reduction over all ranks: whoever has given waits for the others."""

    kind: str
    num_integers: int
    given: dict[int, list[int]] = field(default_factory=dict)

    def result(self) -> list[int]:
        reduce = max if self.kind == "max" else sum
        return [reduce(column) for column in zip(*self.given.values(), strict=True)]


@dataclass(frozen=True)
class Reported:
    """What is true of a rank when it reports, found without the code under test (but for the groups of "matched")."""

    num_groups: int
    capacity: int
    num_samples: int
    is_finished: bool
    has_had_views: bool
    stop_code: int
    num_left: int
    """|R| + |W|: views of this pass not yet observed, and those in the window."""
    knows_end: bool
    """Whether it says that no view is left to observe."""


def matched_steps(reports: list[Reported]) -> int:
    """Steps of an EMIT round of "matched", as many as no active rank is short of: with nothing more to come as many as the most
    groups, else a share of the fewest, the half if those are few."""
    active = [report for report in reports if report.num_groups]
    bound = min(min(report.num_samples for report in active), min(report.capacity for report in active))
    counts = [report.num_groups for report in active]
    is_last = all(report.knows_end for report in reports)
    share = matching._SHARE if min(counts) >= 16 else 0.5
    return min(max(counts) if is_last else max(int(share * min(counts)), 1), bound)


def expected_plan(reports: list[Reported], setup: Setup) -> tuple[Outcome, int, int]:
    """Outcome, steps and stop code of a round, as the design words them."""
    unfinished = [report for report in reports if not report.is_finished]
    if any(report.stop_code for report in reports):
        return Outcome.STOP, 0, max(report.stop_code for report in reports)
    if not setup.joins and any(report.is_finished and report.has_had_views for report in reports):
        return Outcome.PASS_END, 0, 0
    if not unfinished:
        return Outcome.END, 0, 0
    if any(report.capacity == 0 for report in unfinished):
        return Outcome.SKIP, 0, 0
    if setup.rules.alignment == "matched":
        return Outcome.EMIT, matched_steps(reports), 0
    columns = zip(*((report.num_groups, report.capacity, report.num_samples) for report in reports), strict=True)
    return Outcome.EMIT, target_group_count(*(list(column) for column in columns)), 0


class Rank:
    """One rank: fills its window, reports, settles, sums up its steps block by block, and again until the epoch has ended."""

    def __init__(self, world: World, index: int) -> None:
        setup = world.setup
        self.world, self.index, self.setup = world, index, setup
        self.planner = RoundPlanner(
            buffer_size=setup.buffer_size,
            order_seed=setup.order_seed,
            joins=setup.joins,
            **setup.rules.options(setup.l_max, setup.max_rows),
        )
        self.windows = AccumulationWindows[list[int]](setup.accumulate, setup.max_steps, setup.quota)
        self.num_passes = 1
        self.unobserved = list(setup.passes[index][0])
        self.has_had_views = False
        self.knows_end = False
        self.lengths: list[int] = []
        self.emitted: list[int] = []
        self.capacities: list[int] = []
        self.told: list[bool] = []
        self.plans: list[RoundPlan] = []
        self.exchanges: list[tuple[str, int]] = []
        self.blocks: list[list[list[int]]] = []
        self.released: list[SummedStep[list[int]]] = []
        self.waits_for: Reduction | None = None
        self.is_done = False

    @property
    def moves(self) -> list[str]:
        """What this rank can do now: nothing while it waits for others, and at the end."""
        if self.is_done:
            return []
        if self.waits_for:
            return ["go on"] if len(self.waits_for.given) == len(self.world.ranks) else []
        moves = ["observe"] if self.unobserved and self.planner.room else []
        if not self.unobserved and not self.knows_end:
            moves.append("learn")
        if not self.planner.room or self.knows_end:
            moves.append("report")
        return moves

    def observe(self, count: int) -> None:
        for _ in range(min(count, self.planner.room, len(self.unobserved))):
            assert self.planner.observe(self.unobserved[0], patches_of(self.unobserved[0])) == len(self.lengths)
            self.lengths.append(self.unobserved.pop(0))
            self.has_had_views = True

    def learn(self) -> None:
        assert not self.unobserved
        self.knows_end = True

    def report(self, capacity: int, stop_code: int = 0) -> None:
        window, number = dict(self.planner.window), len(self.plans)
        is_finished = not self.unobserved and not window
        if capacity == 0 and not is_finished:
            capacity = self.world.run_out_of_slots(number)
        self.planner.capacity = capacity
        reported = self.planner.report(is_exhausted=self.knows_end, stop_code=stop_code)
        assert (self.planner.window, self.planner.num_observed, self.planner.num_rounds) == (window, len(self.lengths), number)
        assert len(reported) == self.setup.report_size
        num_groups, num_left = reported[0], len(self.unobserved) + len(window)
        assert bool(window) == bool(num_groups)
        if self.setup.rules.alignment == "paper":
            budget = self.setup.rules.budget
            assert num_groups == len(naive_groups(list(window.values()), self.setup.l_max, self.setup.max_rows, budget))
        finished = is_finished, self.has_had_views
        facts = Reported(num_groups, capacity, len(window), *finished, stop_code, num_left, self.knows_end)
        self.world.rounds.setdefault(number, {})[self.index] = facts
        self.capacities.append(capacity)
        self.told.append(self.knows_end)
        self.give("max", reported)

    def give(self, kind: str, values: list[int]) -> None:
        self.waits_for = self.world.reduction(len(self.exchanges), kind, len(values))
        self.exchanges.append((kind, len(values)))
        assert self.index not in self.waits_for.given
        self.waits_for.given[self.index] = values

    def go_on(self) -> None:
        """Out of a reduction that all ranks have given to."""
        assert self.waits_for is not None
        reduction, self.waits_for = self.waits_for, None
        if reduction.kind == "max":
            self.settle(reduction.result())
        else:
            self.release(reduction.result())

    def settle(self, reduced: list[int]) -> None:
        before, reports = dict(self.planner.window), list(self.world.rounds[len(self.plans)].values())
        plan = self.planner.settle(reduced)
        self.plans.append(plan)
        assert (plan.outcome, len(plan.groups), plan.stop_code) == expected_plan(reports, self.setup)
        emitted = [ticket for group in plan.groups for ticket in group]
        for group in plan.groups:
            self.check_budgets(group)
        for ticket in emitted:
            del before[ticket]
        assert self.planner.window == before, "what is not emitted stays"
        assert plan.outcome is Outcome.EMIT or not emitted
        is_active = self.world.rounds[len(self.plans) - 1][self.index].num_samples > 0
        assert plan.outcome is not Outcome.EMIT or all(bool(group) == is_active for group in plan.groups)
        self.emitted += emitted
        self.world.check_potential(self, len(self.plans) - 1, len(emitted))
        if plan.outcome is Outcome.PASS_END:
            self.begin_pass()
        self.is_done = plan.outcome in (Outcome.END, Outcome.STOP)
        if plan.outcome is Outcome.END:
            self.released += self.windows.flush()
        groups = plan.groups if self.setup.max_steps is None else plan.groups[: self.setup.max_steps - self.windows.num_steps]
        sizes = exchange_blocks(len(groups), self.setup.accumulate, self.setup.at_least)
        steps = iter(groups)
        self.blocks = [[next(steps) for _ in range(size)] for size in sizes]
        self.sum_up()

    def check_budgets(self, group: list[int]) -> None:
        lengths, rules = [self.lengths[ticket] for ticket in group], self.setup.rules
        assert lengths == sorted(lengths, reverse=True)
        assert len(group) <= 1 or len(group) * rules.budget(lengths[0]) <= self.setup.l_max
        assert self.setup.max_rows is None or len(group) <= self.setup.max_rows
        assert rules.max_patches is None or len(group) <= 1 or sum(map(patches_of, lengths)) <= rules.max_patches

    def begin_pass(self) -> None:
        """Whoever has observed all of its views gets them anew; what others have not yet observed stays theirs."""
        self.has_had_views = bool(self.planner.window)
        if not self.unobserved:
            passes = self.setup.passes[self.index]
            self.unobserved = list(passes[self.num_passes % len(passes)])
            self.num_passes += 1
            self.knows_end = False

    def sum_up(self) -> None:
        """Gives the counts of the next block; without one, the next round begins."""
        if self.blocks and not self.windows.is_full:
            block = self.blocks[0]
            tokens = [sum(self.lengths[ticket] for ticket in group) for group in block]
            self.give("sum", [*tokens, *map(len, block)])
        self.is_done = self.is_done or self.windows.is_full

    def release(self, sums: list[int]) -> None:
        block = self.blocks.pop(0)
        for group, targets, samples in zip(block, sums[: len(block)], sums[len(block) :], strict=True):
            if not self.windows.is_full:
                self.released += self.windows.add(group, targets, samples)
        self.sum_up()


class World:
    """All ranks of an epoch, and the reductions that they have made so far."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.reductions: list[Reduction] = []
        self.rounds: dict[int, dict[int, Reported]] = {}
        self.rounds_without_slots: set[int] = set()
        self.left: dict[int, dict[int, int]] = {}
        self.emitted: dict[int, dict[int, int]] = {}
        self.ranks = [Rank(self, index) for index in range(len(setup.passes))]

    @property
    def is_done(self) -> bool:
        return all(rank.is_done for rank in self.ranks)

    def able_to(self, move: str) -> list[Rank]:
        return [rank for rank in self.ranks if move in rank.moves]

    def reduction(self, number: int, kind: str, num_integers: int) -> Reduction:
        """The reduction that is a rank's next one; all must be making the same."""
        if number == len(self.reductions):
            assert not self.reductions or len(self.reductions[-1].given) == len(self.ranks), "one reduction at a time"
            self.reductions.append(Reduction(kind, num_integers))
        reduction = self.reductions[number]
        assert (reduction.kind, reduction.num_integers) == (kind, num_integers), "the same exchange on all ranks"
        return reduction

    def run_out_of_slots(self, number: int) -> int:
        """The capacity of an unfinished rank that has no slot in this round: 0, at most D rounds long."""
        if number not in self.rounds_without_slots and len(self.rounds_without_slots) >= self.setup.depth:
            return 1
        self.rounds_without_slots.add(number)
        return 0

    def check_potential(self, rank: Rank, number: int, num_emitted: int) -> None:
        """Phi, the sum over ranks of |R| + |W|, around a round; `rank` has just settled it."""
        assert len(self.rounds[number]) == len(self.ranks), "nobody settles before all have reported"
        left = self.left.setdefault(number, {})
        left[rank.index] = len(rank.unobserved) + len(rank.planner.window)
        self.emitted.setdefault(number, {})[rank.index] = num_emitted
        outcome = rank.plans[number].outcome
        assert number < self.setup.most_rounds
        if len(left) == len(self.ranks):
            fallen = sum(report.num_left for report in self.rounds[number].values()) - sum(left.values())
            assert fallen == sum(self.emitted[number].values())
            assert fallen >= 1 if outcome is Outcome.EMIT else fallen == 0

    def check_partition(self) -> None:
        """R, W and E: each view of the passes begun is unobserved, in the window, or emitted, and in one of them only."""
        for rank in self.ranks:
            passes = self.setup.passes[rank.index]
            begun = [length for number in range(rank.num_passes) for length in passes[number % len(passes)]]
            assert rank.lengths + rank.unobserved == begun
            assert sorted([*rank.planner.window, *rank.emitted]) == list(range(len(rank.lengths)))
            assert all(rank.lengths[ticket] == length for ticket, length in rank.planner.window.items())
            assert len(rank.planner.window) <= self.setup.buffer_size

    def check_agreement(self) -> None:
        """No rank is more than one exchange ahead, and all have made the same so far."""
        most = max(self.ranks, key=lambda rank: len(rank.exchanges))
        for rank in self.ranks:
            assert len(most.exchanges) - len(rank.exchanges) <= 1
            assert rank.exchanges == most.exchanges[: len(rank.exchanges)]
            for plan, other in zip(rank.plans, most.plans, strict=False):
                assert (plan.outcome, len(plan.groups)) == (other.outcome, len(other.groups))

    def check_end(self) -> None:
        """What all ranks have come to."""
        self.check_partition()
        setup, first = self.setup, self.ranks[0]
        assert len({tuple(rank.exchanges) for rank in self.ranks}) == 1
        assert len({tuple((plan.outcome, len(plan.groups)) for plan in rank.plans) for rank in self.ranks}) == 1
        sums = [
            [(s.global_samples, s.global_targets, s.window_samples, s.window_targets) for s in r.released] for r in self.ranks
        ]
        assert all(own == sums[0] for own in sums), "the same number of steps, with the same sums, on all ranks"
        outcomes = [plan.outcome for plan in first.plans]
        assert outcomes.count(Outcome.SKIP) <= len(self.rounds_without_slots) <= setup.depth
        if outcomes[-1] is Outcome.STOP:
            return
        columns = [[group for plan in rank.plans for group in plan.groups][: len(rank.released)] for rank in self.ranks]
        assert [[step.item for step in rank.released] for rank in self.ranks] == columns
        sizes = [sum(map(len, step)) for step in zip(*columns, strict=True)]
        assert [step.global_samples for step in first.released] == sizes
        if outcomes[-1] is Outcome.END:
            assert not any(rank.planner.window or rank.unobserved for rank in self.ranks)
            assert setup.joins or not any(rank.has_had_views for rank in self.ranks)
        elif setup.max_steps is not None and len(sizes) == setup.max_steps:
            assert setup.quota is None or sum(sizes[:-1]) < setup.quota
        else:
            assert setup.quota is not None
            assert sum(sizes[:-1]) < setup.quota <= sum(sizes) < setup.quota + max(sizes)
        self.check_against_the_simulation(columns)

    def check_against_the_simulation(self, columns: list[list[list[int]]]) -> None:
        """The epoch that `simulate_ranks` finds, where it has words for this one."""
        setup = self.setup
        outcome = self.ranks[0].plans[-1].outcome
        if setup.max_steps is not None or (outcome is Outcome.END) is not setup.joins or any(len(p) > 1 for p in setup.passes):
            return
        shards = [passes[0] for passes in setup.passes]
        planners = [
            ObservedPlanner(
                rank.capacities,
                rank.told,
                buffer_size=setup.buffer_size,
                order_seed=setup.order_seed,
                joins=setup.joins,
                **setup.rules.options(setup.l_max, setup.max_rows),
            )
            for rank in self.ranks
        ]
        run = simulate_ranks(shards, planners.__getitem__, max_rounds=len(self.ranks[0].plans) + 1, quota=setup.quota)
        assert [planner.plans for planner in planners] == [rank.plans for rank in self.ranks]
        positions = [[[t % len(shards[r]) for t in group] for group in column] for r, column in enumerate(columns)]
        assert run.steps == [list(step) for step in zip(*positions, strict=True)]

    def run_on(
        self, rng: random.Random, most_moves: int = INF, share_full: float = 0.1, share_stopping: float = 0, stride: int = 4
    ) -> None:
        """Lets ranks that can move do so, `stride` moves of one of them at most before another's turn, until none can."""
        while not self.is_done and most_moves > 0:
            rank = rng.choice(self.ranks)
            if not rank.moves:
                able = [other for other in self.ranks if other.moves]
                assert able, "all wait for each other"
                rank = rng.choice(able)
            for _ in range(rng.randint(1, stride)):
                if not rank.moves:
                    break
                most_moves -= 1
                move = rng.choice(rank.moves)
                if move == "observe":
                    rank.observe(rng.choice([1, 2, INF]))
                elif move == "learn":
                    rank.learn()
                elif move == "report":
                    capacity = 0 if rng.random() < share_full else rng.choice([1, 2, 5, INF])
                    rank.report(capacity, rng.randint(1, 3) if rng.random() < share_stopping else 0)
                else:
                    rank.go_on()
        if self.is_done:
            self.check_end()
