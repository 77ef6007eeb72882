"""An epoch stopped after any step and gone on with, on simulated ranks: the same steps follow, with the same numbers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_cases import BOTH, MATCHED, PAPER, Case, Rules, cases
from resume_world import Epoch, World

from odb_lightning.plan import AccumulationWindows, RoundPlanner
from odb_lightning.runtime.round_state import RoundState

pytestmark = pytest.mark.timeout(120)

SHARDS: dict[str, list[list[int]]] = {
    "alone": [[9, 3, 30, 7, 7, 12, 1, 5, 22, 4, 60, 8, 2, 14]],
    "unequal": [[5, 9, 31, 2, 7, 7, 8, 1, 40, 3, 3, 6], [11, 4], [], [6, 20, 9, 1, 13]],
    "first is empty": [[], [8, 3, 3, 9, 1, 30, 2, 2]],
    "fewer than ranks": [[5], [], [7], []],
    "long on one": [[70, 90, 80, 75, 100], [3, 2, 4, 1, 5, 2, 3, 3, 2, 4, 1, 1]],
}


def shards_of(seed: int, *sizes: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(1, 40) for _ in range(size)] for size in sizes]


def first_step_again(step: int, accumulate: int, num_steps: int) -> int:
    """Where a run that was stopped after `step` goes on."""
    is_last_of_window = (step + 1) % accumulate == 0 or step + 1 == num_steps
    return step + 1 if is_last_of_window else step - step % accumulate


def check_every_stop(world: World, stops: Sequence[int] | None = None) -> Epoch:
    """The uninterrupted epoch, after what follows on each of its steps was compared with it."""
    whole = world.run()
    num_steps = len(whole.steps)
    for stop in range(num_steps) if stops is None else [stop for stop in stops if stop < num_steps]:
        check_stop(world, whole, stop)
    return whole


def check_stop(world: World, whole: Epoch, stop: int) -> Epoch:
    states = whole.states(stop)
    rest = world.run(states)
    again = first_step_again(stop, world.accumulate, len(whole.steps))
    assert rest.numbers == whole.numbers[again:], f"stopped after step {stop}"
    assert rest.numbers_of_states() == whole.numbers_of_states()[again:], f"states of a run stopped after step {stop}"
    for rank, part in enumerate(rest.ranks):
        check_fetched(whole, rank, again, part.fetched, world)
        if world.case.joins and world.max_steps is None:
            assert part.stats.views_expected == len(part.fetched)
            assert sorted([*part.start.done_ids, *part.fetched]) == sorted(whole.ranks[rank].fetched)
    return rest


def check_fetched(whole: Epoch, rank: int, again: int, fetched: list[int], world: World) -> None:
    """Nothing trained before; in join each other sample once."""
    before = {sample_id for info in whole.ranks[rank].infos[:again] for sample_id in info.sample_ids}
    if world.case.joins:
        assert not before & set(fetched)
        assert len(set(fetched)) == len(fetched)


class TestEveryStop:
    @pytest.mark.parametrize("rules", BOTH, ids=["matched", "paper"])
    @pytest.mark.parametrize("accumulate", [1, 3])
    @pytest.mark.parametrize("name", SHARDS)
    def test_in_join(self, name: str, accumulate: int, rules: Rules) -> None:
        case = Case(SHARDS[name], l_max=45, buffer_size=5, order_seed="7/0", rules=rules)
        whole = check_every_stop(World(case, accumulate))
        assert whole.steps == [
            [tuple(sum(map(len, case.shards[:rank])) + position for position in group) for rank, group in enumerate(step)]
            for step in case.run().steps
        ], "the groups of simulated ranks"

    @pytest.mark.parametrize("rules", BOTH, ids=["matched", "paper"])
    @pytest.mark.parametrize(("accumulate", "quota"), [(1, None), (3, None), (2, 45)])
    @pytest.mark.parametrize("name", SHARDS)
    def test_in_non_join(self, name: str, accumulate: int, quota: int | None, rules: Rules) -> None:
        case = Case(SHARDS[name], l_max=45, buffer_size=4, order_seed="7/0", rules=rules, joins=False, quota=quota)
        whole = check_every_stop(World(case, accumulate))
        assert quota is None or max(rank.stats.passes for rank in whole.ranks) > 2

    @given(case=cases(max_ranks=4, with_capacities=False), accumulate=st.integers(1, 4), data=st.data())
    @settings(max_examples=50)
    def test_of_any_case(self, case: Case, accumulate: int, data: st.DataObject) -> None:
        max_steps = data.draw(st.none() | st.integers(1, 12))
        world = World(case, accumulate, max_steps)
        check_every_stop(world, data.draw(st.lists(st.integers(0, 12), max_size=3, unique=True)))

    @given(case=cases(max_ranks=4, with_capacities=False, joins=False), accumulate=st.integers(1, 4), data=st.data())
    @settings(max_examples=50)
    def test_of_any_case_of_non_join(self, case: Case, accumulate: int, data: st.DataObject) -> None:
        world = World(case, accumulate, data.draw(st.none() | st.integers(1, 12)))
        check_every_stop(world, data.draw(st.lists(st.integers(0, 12), max_size=3, unique=True)))

    @pytest.mark.parametrize("max_steps", [1, 4, 7])
    def test_where_the_trainer_ends_the_epoch(self, max_steps: int) -> None:
        world = World(Case(shards_of(1, 30, 20), l_max=60, buffer_size=8, order_seed="7/0"), 3, max_steps)
        whole = check_every_stop(world)
        assert len(whole.steps) == max_steps
        assert World(world.case, 3, max_steps).run(whole.states(max_steps - 1)).steps == []

    @pytest.mark.parametrize("joins", [True, False])
    def test_with_samples_that_policies_leave_out(self, joins: bool) -> None:
        shards = [[0, 0, 9, 80, 4, 0, 7, 7, 80, 3, 12, 0], [80, 0], [0, 5, 80, 6, 2, 2, 0, 31, 0]]
        world = World(Case(shards, l_max=40, buffer_size=4, order_seed="7/0", joins=joins), 2, oversize="drop")
        whole = check_every_stop(world)
        if joins:
            lengths = world.lengths
            assert sorted(whole.trained) == [index for index, length in enumerate(lengths) if 0 < length <= 40]

    def test_samples_that_wait_for_many_windows_are_in_the_state_as_they_were(self) -> None:
        """Buffers of two: messages of samples that stay for long are taken apart."""
        world = World(Case(shards_of(5, 40, 40), l_max=41, buffer_size=3, order_seed="7/0"))
        check_every_stop(world, range(0, 60, 5))


class TestInterruptedAgain:
    @pytest.mark.parametrize("joins", [True, False])
    def test_at_every_step_of_the_rest(self, joins: bool) -> None:
        world = World(Case(shards_of(2, 16, 9), l_max=60, buffer_size=6, order_seed="7/0", joins=joins), 2)
        whole = world.run()
        for first in (0, 1, 4):
            rest = check_stop(world, whole, first)
            offset = first_step_again(first, 2, len(whole.steps))
            for second in range(len(rest.steps)):
                again = first_step_again(offset + second, 2, len(whole.steps))
                assert world.run(rest.states(second)).numbers == whole.numbers[again:]


def union(*parts: Any) -> Counter[Any]:
    return Counter(chain.from_iterable(parts))


def trained_before(epoch: Epoch, stop: int) -> list[Any]:
    """What a run that goes on after `stop` takes as trained."""
    step = epoch.states(stop)[0]["step"]
    infos = [info for rank in epoch.ranks for info in rank.infos if info.step < step]
    return [sample_id for info in infos for sample_id in info.sample_ids]


SIZES = [
    pytest.param(*sizes, rules, id=f"{sizes[0]} to {sizes[1]} {rules.alignment}")
    for sizes in ((2, 1), (2, 4), (4, 3), (1, 3), (3, 2))
    for rules in BOTH
]


class TestChangedSettings:
    @pytest.mark.parametrize(("before", "after", "rules"), SIZES)
    def test_another_world_size_at_every_stop(self, before: int, after: int, rules: Rules) -> None:
        case = Case(shards_of(before, 23), l_max=50, buffer_size=5, order_seed="7/0", rules=rules)
        everything = Counter(range(23))
        whole = World(case, 2, dealt_to=before).run()
        for stop in range(len(whole.steps)):
            rest = World(case, 2, dealt_to=after).run(whole.states(stop))
            assert union(trained_before(whole, stop), rest.trained) == everything
            assert [step[0].step for step in rest.numbers] == list(
                range(whole.states(stop)[0]["step"], whole.states(stop)[0]["step"] + len(rest.steps))
            )
            fetched = [index for rank in rest.ranks for index in rank.fetched]
            assert Counter(fetched) == Counter(rest.trained), "what was trained before is not fetched"

    def test_again_and_again(self) -> None:
        """Another world size, a stop there, the same again, another one, and another budget."""
        case = Case(shards_of(3, 60), l_max=45, buffer_size=5, order_seed="7/0")
        everything = Counter(range(60))
        first = World(case, 1, dealt_to=2).run()
        done = trained_before(first, 3)
        second = World(case, 1, dealt_to=3)
        rest = second.run(first.states(3))
        assert union(done, rest.trained) == everything
        for stop in range(len(rest.steps)):
            same = second.run(rest.states(stop))
            assert same.numbers == rest.numbers[stop + 1 :]
            assert same.numbers_of_states() == rest.numbers_of_states()[stop + 1 :]
        done += trained_before(rest, 2)
        third = World(replace(case, l_max=70, buffer_size=9), 1, dealt_to=4)
        last = third.run(rest.states(2))
        assert union(done, last.trained) == everything
        for stop in range(len(last.steps)):
            assert third.run(last.states(stop)).numbers == last.numbers[stop + 1 :]
        done += trained_before(last, 1)
        assert json.dumps(last.states(1)[0]).count("tickets") == 2 + 3 + 1, "what it is the rest of is in it once"
        fourth = World(replace(case, l_max=30), 1, dealt_to=4)
        anew = fourth.run(last.states(1))
        assert union(done, anew.trained) == everything
        assert {sample_id for rank in anew.ranks for sample_id in rank.start.done_ids} == set(done)
        done += trained_before(anew, 2)
        fifth = World(case, 1, dealt_to=2).run(anew.states(2))
        assert union(done, fifth.trained) == everything, "also when ranks go on with the rest of each its own"
        assert all(Counter(rank.start.done_ids) == Counter(done) for rank in fifth.ranks)

    @pytest.mark.parametrize(
        "changed",
        [{"l_max": 90}, {"l_max": 20}, {"buffer_size": 3}, {"buffer_size": 30}, {"max_rows": 2}, {"rules": PAPER}],
        ids=lambda changed: " ".join(changed),
    )
    def test_another_budget_window_or_rule_at_every_stop(self, changed: dict[str, Any]) -> None:
        case = Case(shards_of(4, 20, 6, 0), l_max=50, buffer_size=6, order_seed="7/0", rules=MATCHED)
        whole = World(case, 1).run()
        for stop in range(len(whole.steps)):
            rest = World(replace(case, **changed)).run(whole.states(stop))
            assert union(trained_before(whole, stop), rest.trained) == Counter(range(26))
            for rank, part in enumerate(rest.ranks):
                assert set(part.fetched) <= set(World(case).base(rank, 3))

    @given(
        case=cases(max_ranks=3, with_capacities=False),
        accumulate=st.integers(1, 3),
        sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
        stops=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    )
    @settings(max_examples=50)
    def test_any_world_sizes_one_after_the_other(self, case: Case, accumulate: int, sizes: list[int], stops: list[int]) -> None:
        case = replace(case, quota=None)
        done: list[Any] = []
        states = None
        for size, stop in zip(sizes, stops, strict=False):
            epoch = World(case, accumulate, dealt_to=size).run(states)
            assert union(done, epoch.trained) == Counter(range(case.num_views))
            if not epoch.steps:
                break
            stop = min(stop, len(epoch.steps) - 1)
            done += trained_before(epoch, stop)
            states = epoch.states(stop)


class TestPlanner:
    """`RoundPlanner.restore` by itself."""

    @pytest.mark.parametrize(("alignment", "max_patches"), [("matched", None), ("matched", 15), ("paper", None)])
    def test_a_restored_planner_plans_what_the_first_one_would(self, alignment: Any, max_patches: int | None) -> None:
        options: dict[str, Any] = {"l_max": 60, "buffer_size": 9, "order_seed": "1/2", "alignment": alignment}
        options["max_patches"] = max_patches
        rng = random.Random(0)
        sizes = [(rng.randint(1, 50), rng.randint(0, 9)) for _ in range(60)]
        first = RoundPlanner(**options)
        planners = [first]
        while first.num_observed < len(sizes) or first.window:
            for planner in planners:
                while planner.room and planner.num_observed < len(sizes):
                    planner.observe(*sizes[planner.num_observed])
            is_exhausted = first.num_observed == len(sizes)
            reports = [planner.report(is_exhausted=is_exhausted) for planner in planners]
            assert all(report == reports[0] for report in reports)
            plans = [planner.settle(reports[0]) for planner in planners]
            assert all(plan == plans[0] for plan in plans)
            window = {ticket: (length, first.patches.get(ticket, 0)) for ticket, length in first.window.items()}
            planners.append(RoundPlanner(**options))
            planners[-1].restore(
                window, num_observed=first.num_observed, num_rounds=first.num_rounds, pass_start=first.pass_start
            )
        assert len(planners) > 5


class TestWindows:
    """`AccumulationWindows(num_steps=, num_samples=)` by itself."""

    @given(
        accumulate=st.integers(1, 4),
        samples=st.lists(st.integers(1, 9), min_size=1, max_size=20),
        max_steps=st.none() | st.integers(1, 25),
        quota=st.none() | st.integers(1, 90),
    )
    def test_windows_from_any_whole_one_on(
        self, accumulate: int, samples: list[int], max_steps: int | None, quota: int | None
    ) -> None:
        def released(num_steps: int) -> list[Any]:
            windows = AccumulationWindows[int](
                accumulate, max_steps, quota, num_steps=num_steps, num_samples=sum(samples[:num_steps])
            )
            steps = []
            for step in range(num_steps, len(samples)):
                if windows.is_full:
                    break
                steps += windows.add(step, 1.0, samples[step])
            return steps + windows.flush()

        whole = released(0)
        for step in range(0, len(whole) + 1, accumulate):
            assert released(step) == whole[step:]


class TestRoundState:
    STATE = RoundState(
        first_step=4,
        first_samples=11,
        num_rounds=3,
        num_observed=20,
        pass_start=0,
        num_taken=22,
        is_exhausted=False,
        group_sizes=[2, 0, 1],
        tickets=[7, 3, 9, 15, 16],
        places=[8, 3, 10, 17, 18],
        lengths=[6, 5, 9, 4, 2],
        patches=[0, 1, 0, 3, 0],
    )

    def test_it_is_divided_into_groups_and_a_window(self) -> None:
        assert self.STATE.groups() == [[7, 3], [], [9]]
        assert self.STATE.window() == {15: (4, 3), 16: (2, 0)}
        assert self.STATE.last_step == 7

    def test_steps_that_were_trained_leave_it(self) -> None:
        later = self.STATE.at(6, 19)
        assert (later.first_step, later.first_samples, later.last_step) == (6, 19, 7)
        assert later.groups() == [[9]]
        assert later.window() == self.STATE.window()
        assert later.at(7, 20).groups() == []
        assert self.STATE.at(4, 11) == self.STATE
        assert later.num_taken == self.STATE.num_taken

    @pytest.mark.parametrize("step", [3, 8])
    def test_steps_of_other_rounds_are_refused(self, step: int) -> None:
        with pytest.raises(ValueError, match=rf"step {step} is not in the round of steps 4 to 7"):
            self.STATE.at(step, 11)

    def test_it_comes_back_from_plain_containers(self) -> None:
        assert RoundState.from_dict(self.STATE.to_dict()) == self.STATE

    @pytest.mark.parametrize("changed", [{"tickets": [7, 3, 9, 15]}, {"patches": []}, {"group_sizes": [2, 0, 9]}, {"more": 1}])
    def test_what_is_none_is_refused(self, changed: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"its (columns|entries) are not"):
            RoundState.from_dict(self.STATE.to_dict() | changed)
