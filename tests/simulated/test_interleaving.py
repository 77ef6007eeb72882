"""Planners driven as real ranks are, in any interleaving of what each does between two reductions."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rank_cases import BOTH, MATCHED, PAPER, Case, Rules, cases_of_many_ranks, rules
from rank_world import Rank, Setup, World

from odb_lightning.plan import Outcome, RoundPlan
from odb_lightning.plan.protocol import INF


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Up to four ranks with few views, or without; in non-join, some have other views in each second pass, or none."""
    joins = draw(st.booleans())
    world_size = draw(st.sampled_from([3, 2, 4, 1]))
    views = st.lists(st.integers(1, 40), min_size=draw(st.sampled_from([0, 3])), max_size=draw(st.sampled_from([12, 3])))
    views_or_none = draw(st.sampled_from([views, views | st.just(list[int]())]))
    most_passes = 1 if joins else draw(st.sampled_from([1, 2]))
    passes = [draw(st.lists(views_or_none, min_size=1, max_size=most_passes)) for _ in range(world_size)]
    return Setup(
        passes=passes,
        l_max=draw(st.integers(1, 120)),
        buffer_size=draw(st.integers(1, 8)),
        max_rows=draw(st.none() | st.integers(1, 4)),
        order_seed=draw(st.sampled_from([None, "2/1"])),
        joins=joins,
        quota=None if joins else draw(st.integers(1, 40)),
        accumulate=draw(st.integers(1, 4)),
        max_steps=draw(st.none() | st.none() | st.integers(1, 20)),
        at_least=draw(st.integers(1, 4)),
        rules=draw(rules()),
    )


CAPACITIES = st.sampled_from([0, 0, 1, 2, 5, INF])
WHICH = st.integers(0, 3)


def can(move: str) -> Callable[[Interleaving], bool]:
    return lambda machine: bool(machine.world.able_to(move))


class Interleaving(RuleBasedStateMachine):
    """One move of one rank at a time; `which` picks among those that can make it."""

    @initialize(setup=setups())
    def begin(self, setup: Setup) -> None:
        self.world = World(setup)

    def pick(self, move: str, which: int) -> Rank:
        ranks = self.world.able_to(move)
        return ranks[which % len(ranks)]

    @precondition(can("observe"))
    @rule(which=WHICH, count=st.integers(1, 8))
    def observe(self, which: int, count: int) -> None:
        self.pick("observe", which).observe(count)

    @precondition(can("learn"))
    @rule(which=WHICH)
    def learn_that_the_shard_has_ended(self, which: int) -> None:
        self.pick("learn", which).learn()

    @precondition(can("report"))
    @rule(which=WHICH, capacity=CAPACITIES)
    def report(self, which: int, capacity: int) -> None:
        self.pick("report", which).report(capacity)

    @precondition(can("report"))
    @rule(which=WHICH, capacity=CAPACITIES, stop_code=st.sampled_from([0, 0, 0, 0, 0, 1, 3]))
    def report_a_stop_now_and_then(self, which: int, capacity: int, stop_code: int) -> None:
        self.pick("report", which).report(capacity, stop_code)

    @precondition(can("go on"))
    @rule(which=WHICH)
    def go_on(self, which: int) -> None:
        self.pick("go on", which).go_on()

    @precondition(lambda self: not self.world.is_done)
    @rule(seed=st.integers(0, 2**32 - 1), most_moves=st.integers(1, 60))
    def many_moves(self, seed: int, most_moves: int) -> None:
        self.world.run_on(random.Random(seed), most_moves)

    @precondition(lambda self: self.world.is_done)
    @rule(setup=setups())
    def begin_another_epoch(self, setup: Setup) -> None:
        self.world.check_end()
        self.world = World(setup)

    @invariant()
    def views_are_unobserved_or_waiting_or_emitted(self) -> None:
        self.world.check_partition()

    @invariant()
    def ranks_make_the_same_exchanges(self) -> None:
        self.world.check_agreement()

    @invariant()
    def somebody_can_move(self) -> None:
        assert self.world.is_done or any(rank.moves for rank in self.world.ranks)

    def teardown(self) -> None:
        if sys.exc_info()[0] is None and hasattr(self, "world"):
            self.world.run_on(random.Random(0))


TestInterleaving = Interleaving.TestCase
TestInterleaving.settings = settings(max_examples=250, stateful_step_count=60)


@pytest.mark.parametrize("joins", [True, False])
@settings(max_examples=30)
@given(st.data())
def test_up_to_64_ranks_in_any_interleaving(joins: bool, data: st.DataObject) -> None:
    case: Case = data.draw(cases_of_many_ranks(joins=joins))
    rng = random.Random(data.draw(st.integers(0, 2**32 - 1)))
    share_full, share_stopping = data.draw(st.sampled_from([0.05, 0.002, 0])), data.draw(st.sampled_from([0, 0, 0.001]))
    setup = Setup(
        passes=[[shard] for shard in case.shards],
        l_max=case.l_max,
        buffer_size=case.buffer_size,
        max_rows=case.max_rows,
        order_seed=case.order_seed,
        joins=case.joins,
        quota=None if case.joins else case.samples_due,
        accumulate=data.draw(st.integers(1, 4)),
        at_least=16,
        rules=case.rules,
    )
    world = World(setup)
    world.run_on(rng, share_full=share_full, share_stopping=share_stopping)
    assert world.is_done
    world.check_agreement()


def started(*shards: list[int], rules: Rules, joins: bool = True) -> World:
    quota = None if joins else 9
    return World(Setup([[shard] for shard in shards], l_max=10, buffer_size=4, joins=joins, quota=quota, rules=rules))


@pytest.mark.parametrize("rules", BOTH, ids=["matched", "paper"])
@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("stopping_rank", [0, 1, 2])
def test_a_stop_ends_all_ranks_in_that_round_and_nothing_is_emitted(joins: bool, stopping_rank: int, rules: Rules) -> None:
    """Also where the round would have emitted, and on a rank that has no view."""
    world = started([5, 5, 5], [5], [], rules=rules, joins=joins)
    for rank in world.ranks:
        rank.observe(9)
        rank.learn()
        rank.report(INF, stop_code=7 if rank.index == stopping_rank else 0)
    for rank in reversed(world.ranks):
        rank.go_on()
    assert [rank.plans for rank in world.ranks] == [[RoundPlan(Outcome.STOP, [], stop_code=7)]] * 3
    assert [rank.exchanges for rank in world.ranks] == [[("max", world.setup.report_size)]] * 3
    assert [len(rank.planner.window) for rank in world.ranks] == [3, 1, 0]
    assert world.is_done
    world.check_end()


@pytest.mark.parametrize(("rules", "num_emits"), [(PAPER, 2), (MATCHED, 1)], ids=["paper", "matched"])
def test_nobody_goes_on_before_the_last_rank_has_reported(rules: Rules, num_emits: int) -> None:
    """The two samples of rank 0 are two groups of one by the paper's rule, and one group of two else."""
    world = started([5, 5], [5], rules=rules)
    for rank in world.ranks:
        rank.observe(9)
        rank.learn()
    world.ranks[1].report(INF)
    assert [rank.moves for rank in world.ranks] == [["report"], []]
    assert not world.ranks[1].emitted
    world.ranks[0].report(INF)
    assert [rank.moves for rank in world.ranks] == [["go on"], ["go on"]]
    world.ranks[1].go_on()
    # its counts of one step are given, and wait for those of rank 0
    plan, sums = ("max", world.setup.report_size), ("sum", 2)
    assert world.ranks[1].exchanges == [plan, sums]
    assert not world.ranks[1].moves
    assert not world.ranks[1].released
    world.run_on(random.Random(1))
    assert world.ranks[1].exchanges == [plan, sums] * num_emits + [plan]
