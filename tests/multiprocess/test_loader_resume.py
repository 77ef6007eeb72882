"""The loader's state on several ranks, with real processes: runs that were stopped anywhere go on in new processes, as many or
more or fewer of them."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from tests.multiprocess.loader_cases import TIMEOUTS
from tests.multiprocess.ranks import run_ranks
from tests.multiprocess.resume_cases import FORMS, NUMBER, loader_of, states_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

MODULE = "tests.multiprocess.resume_cases"
SIZES = [1, 2, 4]
EVERY_STOP = ("unequal",)
"""Of the other forms some."""
ELSEWHERE = [("default", 2), ("default", 7), ("dealt", 3), ("dealt", 4)]
"""Forms, and steps after which they go on with another world size."""
OPTIONS = {"l_max": 70, "buffer_size": 20}


class Runs:
    """The uninterrupted runs of each world size, and those that go on from them: each is run once."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self.folder = str(folders.mktemp("states"))
        self._found: dict[Any, list[Any]] = {}

    def _ranks(self, function: str, world_size: int, key: Any = None, **arguments: Any) -> list[Any]:
        if (function, world_size, key) not in self._found:
            results = run_ranks(
                f"{MODULE}:{function}",
                world_size,
                self._folders.mktemp("ranks"),
                seconds=100,
                states_in=self.folder,
                **arguments,
            )
            self._found[function, world_size, key] = [result.value for result in results]
        return self._found[function, world_size, key]

    def whole(self, world_size: int) -> list[Any]:
        return self._ranks("run_whole", world_size, forms=list(FORMS))

    def rest(self, world_size: int) -> list[Any]:
        return self._ranks("go_on", world_size, forms={form: self.stops(world_size, form) for form in FORMS})

    def stops(self, world_size: int, form: str) -> list[int]:
        num_steps = len(self.whole(world_size)[0][form]["first"])
        assert num_steps > 5
        return list(range(num_steps)) if form in EVERY_STOP else [1, num_steps // 2, num_steps - 1]

    def elsewhere(self, before: int, after: int) -> list[Any]:
        if before == 3:
            self.elsewhere(4, 3)
        else:
            self.whole(before)
        return self._ranks("go_on_elsewhere", after, before, before=before, cases=CASES[before, after])

    def disagreeing(self, cases: list[str]) -> list[Any]:
        self.whole(2)
        return self._ranks("disagree", 2, cases=cases)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def again(form: str, stop: int, num_steps: int) -> int:
    """The first step that a run trains which was stopped after this one."""
    accumulate = FORMS[form].get("accumulate", 1)
    is_last_of_window = (stop + 1) % accumulate == 0 or stop + 1 == num_steps
    return stop + 1 if is_last_of_window else stop - stop % accumulate


def ids_in(steps: list[Any]) -> list[int]:
    return [sample_id for step in steps for sample_id in step["sample_ids"]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", SIZES)
class TestTheSameWorldSize:
    def test_the_batches_that_would_have_followed_follow(self, runs: Runs, world_size: int, form: str) -> None:
        stops = runs.stops(world_size, form)
        for rank, (whole, rest) in enumerate(zip(runs.whole(world_size), runs.rest(world_size), strict=True)):
            first = whole[form]["first"]
            for stop, found in zip(stops, rest[form]["stops"], strict=True):
                assert found["rest"] == first[again(form, stop, len(first)) :], f"rank {rank}, stopped after step {stop}"
                assert found["states"], f"rank {rank}, states of a run that was stopped after step {stop}"
            assert rest[form]["second"] == whole[form]["second"], "and so does the next epoch"

    def test_what_was_trained_is_not_fetched_again(self, runs: Runs, world_size: int, form: str) -> None:
        for rank, (whole, rest) in enumerate(zip(runs.whole(world_size), runs.rest(world_size), strict=True)):
            first = whole[form]["first"]
            for stop, found in zip(runs.stops(world_size, form), rest[form]["stops"], strict=True):
                before = ids_in(first[: again(form, stop, len(first))])
                fetched = dict(found["fetched"])
                if "non_join" in FORMS[form].values():
                    continue  # whose passes go on, and overlap
                assert not set(before) & set(fetched), f"rank {rank} after {stop}"
                assert set(fetched.values()) <= {1}
                assert set(before) <= set(found["resumed"])
                assert found["expected"] >= len(ids_in(found["rest"]))
                if form not in ("drops", "ended"):
                    assert Counter(found["resumed"]) == Counter(before)
                    assert Counter(fetched) == Counter(ids_in(found["rest"]))
                    assert found["expected"] == len(fetched)


def test_the_forms_are_what_they_are_to_be(runs: Runs) -> None:
    """Ranks that are empty, and idle at the end; more than one pass; an epoch that the trainer ends."""
    unequal, non_join, ended = ([rank[form]["first"] for rank in runs.whole(4)] for form in ("unequal", "non_join", "ended"))
    assert all(step["is_idle"] for step in unequal[2])
    assert [any(step["is_idle"] for step in steps) for steps in unequal] == [False, True, True, True]
    assert len(unequal[0]) % 3, "a short last window"
    assert not any(step["is_idle"] for rank in (0, 1, 3) for step in non_join[rank])
    assert max(Counter(ids_in(non_join[1])).values()) > 2
    assert {len(steps) for steps in ended} == {7}


CASES: dict[tuple[int, int], list[list[Any]]] = {
    (2, 1): [[form, stop, None, {}] for form, stop in ELSEWHERE],
    (2, 4): [[form, stop, None, {}] for form, stop in ELSEWHERE] + [["default", 4, None, OPTIONS]],
    (4, 3): [["default", 2, 3, {}], ["dealt", 3, 2, {}]],
    (3, 2): [["default", 2, None, {}], ["dealt", 1, None, {}]],
    (2, 2): [["default", 4, None, OPTIONS]],
}
"""The stops of (3, 2) are where the second interruption of (4, 3) was."""


def trained_before(steps_of_ranks: list[Any], form: str, stop: int) -> list[int]:
    num_steps = len(steps_of_ranks[0])
    return [sample_id for steps in steps_of_ranks for sample_id in ids_in(steps[: again(form, stop, num_steps)])]


class TestAnotherWorldSize:
    @pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (4, 3)])
    def test_each_sample_that_is_left_is_trained_once(self, runs: Runs, before: int, after: int) -> None:
        results = runs.elsewhere(before, after)
        for number, (form, stop, _, _) in enumerate(CASES[before, after]):
            trained = trained_before([rank[form]["first"] for rank in runs.whole(before)], form, stop)
            assert len(trained) > 8
            self.check([rank[number] for rank in results], trained)

    def test_a_second_interruption_and_yet_another_world_size(self, runs: Runs) -> None:
        third = runs.elsewhere(4, 3)
        last = runs.elsewhere(3, 2)
        for number, (form, stop, count, _) in enumerate(CASES[4, 3]):
            trained = trained_before([rank[form]["first"] for rank in runs.whole(4)], form, stop)
            trained += [sample_id for rank in third for sample_id in ids_in(rank[number]["rest"][:count])]
            self.check([rank[number] for rank in last], trained)

    def check(self, ranks: list[Any], trained: list[int]) -> None:
        rest = [sample_id for rank in ranks for sample_id in ids_in(rank["rest"])]
        assert Counter(trained) + Counter(rest) == Counter(range(NUMBER))
        fetched = Counter(index for rank in ranks for index, count in rank["fetched"] for _ in range(count))
        assert fetched == Counter(rest), "nothing that was trained is fetched"
        assert {tuple(rank["resumed"]) for rank in ranks} == {tuple(sorted(trained))}
        assert sum(rank["expected"] for rank in ranks) == len(rest)
        assert len({len(rank["rest"]) for rank in ranks}) == 1

    def test_other_options_with_the_same_one(self, runs: Runs) -> None:
        results = runs.elsewhere(2, 2)
        trained = trained_before([rank["default"]["first"] for rank in runs.whole(2)], "default", 4)
        rest = [sample_id for rank in results for sample_id in ids_in(rank[0]["rest"])]
        assert Counter(trained) + Counter(rest) == Counter(range(NUMBER))

    def test_what_can_not_be_dealt_anew_is_refused(self, runs: Runs) -> None:
        runs.whole(2)

        def begin(form: str, states: Any, **changed: Any) -> None:
            with loader_of(form, 0, 3, is_explicit=True, **changed) as loader:
                loader.load_state_dict(states)
                loader.state_dict()

        def states(form: str) -> list[Any]:
            return [states_of(runs.folder, form, 2, rank)[4] for rank in range(2)]

        for form, told in (
            ("unequal", "a sampler of each rank's own can't be dealt to others"),
            ("no quota", "world_size was 2 and is 3: the rest of an epoch can't be planned anew in non_join"),
        ):
            with pytest.raises(ValueError, match=told):
                begin(form, states(form))
        with pytest.raises(ValueError, match=r"state is of world_size=2, and this is 3: .* given the states of all ranks"):
            begin("default", states("default")[0])
        begin("default", states("default"))

    def test_states_of_different_moments_are_refused(self, runs: Runs) -> None:
        runs.whole(2)
        states = [states_of(runs.folder, "default", 2, rank)[3 + rank] for rank in range(2)]
        with pytest.raises(ValueError, match=r"not of one moment of one run: step is \[4, 5\]"):
            loader_of("default", 0, 3, is_explicit=True).load_state_dict(states)


DISAGREE = {
    "moment": r"step to begin at is 7 on rank 1 and 4 on rank 0",
    "nothing": r"step to begin at is 0 on rank 1 and 4 on rank 0",
    "beginning": r"steps of the round to resume is None on rank 1 and \d+ on rank 0",
    "epoch": r"epoch is 1 on rank 1 and 0 on rank 0",
    "rank": r"the loader's state is that of rank 0, and this is rank 1",
    "options": r"l_max is 80 on rank 1 and 90 on rank 0",
    "length": r"rank 1 failed in dataset\[\d+\]: .*it has length and patches \(\d+, 0\) now, and had",
}


class TestRanksThatDisagree:
    @pytest.mark.parametrize("case", DISAGREE)
    def test_it_is_told_on_both(self, runs: Runs, case: str) -> None:
        for rank, results in enumerate(runs.disagreeing(list(DISAGREE))):
            result = results[case]
            assert result["error"] is not None, "the epoch ended as if nothing had happened"
            assert re.search(DISAGREE[case], result["error"]), f"rank {rank}: {result['error']}"
            assert result["seconds"] < TIMEOUTS.exchange
            assert result["clean"], "a process is left"

    def test_then_they_can_go_on_together(self, runs: Runs) -> None:
        for whole, results in zip(runs.whole(2), runs.disagreeing(list(DISAGREE)), strict=True):
            assert results["after"] == whole["default"]["first"][4:]
