"""The state of a loader on one rank, and runs that go on from it. (Several ranks: tests/multiprocess/test_loader_resume.py.)"""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import json
import pickle
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler

from odb_lightning import ODBBatch, ODBDataLoader, resume
from odb_lightning.runtime.errors import ODBLoaderError
from tests.loader_data import Augmented, Lengths, collate_augmented, lognormal_lengths, make_loader
from tests.loader_processes import no_process_is_left  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("no_process_is_left")]

State = dict[str, Any]
NUMBER = 44
LENGTHS = lognormal_lengths(NUMBER, seed=4, longest=50)


def patches(sample: Any) -> int:
    return sample["id"] % 5


def loader_of(dataset: Any = None, *, attached: int | None = None, **options: Any) -> ODBDataLoader:
    """Of samples with random lengths and values, and a random collate. `attached`: steps of an epoch in a trainer."""
    defaults: dict[str, Any] = {"collate_fn": collate_augmented, "buffer_size": 16, "num_workers": 0}
    loader = make_loader(Augmented(LENGTHS) if dataset is None else dataset, **(defaults | options))
    if attached is not None:
        loader.attach(rank=0, world_size=1, accumulate=loader.accumulate or 1, max_steps=attached)
    return loader


def facts(batch: ODBBatch) -> Any:
    """All that there is to a batch."""
    data = batch.data
    return batch.step, data["input_ids"].tolist(), data["ids"], data["drawn"], data["drawn_by_collate"]


def by_json(state: State) -> State:
    return json.loads(json.dumps(state))  # type: ignore[no-any-return]


def by_torch(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


@dataclasses.dataclass
class Whole:
    """An uninterrupted epoch, the one after it, and the states after each batch of the first."""

    batches: list[Any]
    following: list[Any]
    states: list[State]

    def again(self, stop: int) -> int:
        """The first step that a run trains which was stopped after this one."""
        accumulate = self.batches[0][0].accumulate
        is_last_of_window = (stop + 1) % accumulate == 0 or stop + 1 == len(self.batches)
        return stop + 1 if is_last_of_window else stop - stop % accumulate


def whole_of(**options: Any) -> Whole:
    with loader_of(**options) as loader:
        batches, states = [], []
        for batch in loader:
            batches.append(facts(batch))
            states.append(loader.state_dict())
            assert batch.step.state_dict() == states[-1]
        return Whole(batches, [facts(batch) for batch in loader], states)


def states_of(loader: ODBDataLoader, count: int) -> list[State]:
    """After each of the first batches."""
    states = []
    for batch in loader:
        states.append(batch.step.state_dict())
        if len(states) == count:
            break
    return states


def state_after(count: int, **options: Any) -> State:
    with loader_of(**options) as loader:
        return states_of(loader, count)[-1]


def ids_of(loader: ODBDataLoader) -> list[Any]:
    return [sample_id for batch in loader for sample_id in batch.step.sample_ids]


FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"alignment": "paper", "buffer_size": 30},
    "accumulate": {"accumulate": 3, "max_rows": 3},
    "in order": {"shuffle": False, "accumulate": 2, "buffer_size": 5},
    "ended by the trainer": {"attached": 10, "accumulate": 3},
    "non_join": {"mode": "non_join"},
    "non_join with quota": {"mode": "non_join", "quota": 80, "accumulate": 2, "alignment": "paper"},
    "patches": {"patches_fn": patches, "max_patches": 5, "budget": "quadratic"},
    "drops": {"oversize": "drop", "l_max": 20, "accumulate": 2},
    "own sampler": {"sampler": [*range(43, 15, -1), 7, 7, 3]},
    "dealt sampler": {"sampler": RandomSampler(range(30)), "deal_sampler": True},
}


class TestEveryStop:
    @pytest.mark.filterwarnings("ignore:.*is dropped .policy oversize")
    @pytest.mark.parametrize("name", FORMS)
    def test_the_batches_that_would_have_followed_follow(self, name: str) -> None:
        whole = whole_of(**FORMS[name])
        assert len(whole.batches) > 8
        with loader_of(**FORMS[name]) as loader:
            for stop, state in enumerate(whole.states):
                loader.load_state_dict((by_json if stop % 2 else by_torch)(state))
                seen, states = [], []
                for batch in loader:
                    seen.append(facts(batch))
                    states.append(loader.state_dict())
                assert seen == whole.batches[whole.again(stop) :], f"stopped after step {stop}"
                assert states == whole.states[whole.again(stop) :], f"states of a run that was stopped after step {stop}"
            assert [facts(batch) for batch in loader] == whole.following, "and so do the epochs after it"

    def test_with_two_workers_in_a_loader_of_its_own(self) -> None:
        whole = whole_of(num_workers=2, accumulate=2)
        for stop in range(0, len(whole.states), 5):
            with loader_of(num_workers=2, accumulate=2) as loader:
                loader.load_state_dict(by_json(whole.states[stop]))
                assert [facts(batch) for batch in loader] == whole.batches[whole.again(stop) :]
        assert len(whole.states) > 8

    def test_interrupted_a_second_time_in_the_same_epoch(self) -> None:
        whole = whole_of(accumulate=2)
        for first, second in ((0, 1), (2, 6), (5, 8)):
            with loader_of(accumulate=2) as loader:
                loader.load_state_dict(by_json(whole.states[first]))
                start = whole.again(first)
                states = states_of(loader, second - start + 1)
            assert states == whole.states[start : second + 1]
            with loader_of(accumulate=2) as loader:
                loader.load_state_dict(by_json(states[-1]))
                assert [facts(batch) for batch in loader] == whole.batches[whole.again(second) :]
                assert [facts(batch) for batch in loader] == whole.following

    def test_in_a_later_epoch(self) -> None:
        with loader_of() as loader:
            list(loader)
            state = states_of(loader, 4)[-1]
            loader.set_epoch(1)
            second, third = [facts(batch) for batch in loader], [facts(batch) for batch in loader]
        with loader_of() as loader:
            loader.load_state_dict(state)
            assert [facts(batch) for batch in loader] == second[4:]
            assert [facts(batch) for batch in loader] == third

    @pytest.mark.parametrize(
        "changed",
        [
            {"num_workers": 0},
            {"num_workers": 1},
            {"prefetch_factor": 5},
            {"persistent_workers": False},
            {"multiprocessing_context": "forkserver", "num_workers": 0},
        ],
        ids=lambda changed: " ".join(changed),
    )
    def test_whatever_the_processes(self, changed: dict[str, Any]) -> None:
        whole = whole_of(num_workers=2)
        with warnings.catch_warnings(), loader_of(**({"num_workers": 2} | changed)) as loader:
            warnings.simplefilter("error")
            loader.load_state_dict(whole.states[5])
            assert [facts(batch) for batch in loader] == whole.batches[6:]
            assert [facts(batch) for batch in loader] == whole.following


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_first_twenty_batches_after_a_resume_are_those_that_follow(num_workers: int) -> None:
    """Their ids, and what random transforms and the collate drew; whatever the number of workers was before."""
    data = Augmented(lognormal_lengths(200, seed=6, longest=50))
    whole = whole_of(dataset=data, num_workers=2 - num_workers)
    with loader_of(data, num_workers=num_workers) as loader:
        loader.load_state_dict(by_json(whole.states[10]))
        first = [facts(batch) for batch in itertools.islice(loader, 20)]
    assert first == whole.batches[11:31]


class Fetched(Lengths):
    """Counts the calls of `__getitem__` for each sample, in all processes (under fork)."""

    def __init__(self, lengths: Any) -> None:
        super().__init__(lengths)
        self.counts = get_context("fork").Array("q", len(self.lengths))

    def __getitem__(self, index: int) -> Any:
        with self.counts.get_lock():
            self.counts[index] += 1
        return super().__getitem__(index)


class TestFetching:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_what_was_trained_is_not_fetched_again_and_the_rest_once(self, num_workers: int) -> None:
        options: dict[str, Any] = {"buffer_size": 16, "num_workers": num_workers, "accumulate": 2}
        with make_loader(Lengths(LENGTHS), **options) as loader:
            batches = [batch.step for batch in loader]
        for stop in (0, 3, 6, len(batches) - 1):
            dataset = Fetched(LENGTHS)
            with make_loader(dataset, **options) as loader:
                state = batches[stop].state_dict()
                loader.load_state_dict(state)
                rest = ids_of(loader)
                stats = loader.stats
            fetched = Counter({index: count for index, count in enumerate(dataset.counts) if count})
            assert fetched == Counter(rest)
            trained = [sample_id for step in batches[: state["step"]] for sample_id in step.sample_ids]
            assert Counter(trained) + Counter(rest) == Counter(range(NUMBER))
            assert stats.views_expected == len(rest)
            assert Counter(stats.resumed_ids) == Counter(trained)

    def test_a_restore_costs_a_window(self) -> None:
        options: dict[str, Any] = {"buffer_size": 32, "num_workers": 0}
        with make_loader(Lengths([7] * 6000), **options) as loader:
            state = states_of(loader, 250)[-1]
        dataset = Fetched([7] * 6000)
        with make_loader(dataset, **options) as loader:
            loader.load_state_dict(state)
            next(iter(loader))
            depth = loader.stats.outstanding_depth
        # While the first batch is on its way, the collate process plans the next rounds: as many as have room.
        assert state["round"]["num_taken"] > 2000
        assert sum(dataset.counts) <= 12 * depth < 800

    @pytest.mark.filterwarnings("ignore:.*is dropped .policy")
    def test_what_a_policy_left_out_before_is_done_with_and_counted_once(self) -> None:
        lengths = [0, 5, 90, 7] * 15
        options: dict[str, Any] = {"oversize": "drop", "buffer_size": 8, "num_workers": 0, "shuffle": False}
        with make_loader(Lengths(lengths), **options) as loader:
            (*_, state) = states_of(loader, 2)
            loader.load_state_dict(state)
            rest = ids_of(loader)
            stats = loader.stats
        assert Counter([*rest, *stats.dropped_ids, *stats.resumed_ids]) == Counter(range(60))
        assert stats.views_expected == len(rest) + len(stats.dropped_ids)
        assert stats.dropped_ids
        assert {index for index in stats.resumed_ids if lengths[index] in (0, 90)}


def numbers_in(state: Any) -> Iterator[int]:
    """All that are in it; it consists of nothing but plain containers of numbers and text."""
    if type(state) is dict:
        for key, value in state.items():
            assert type(key) is str
            yield from numbers_in(value)
    elif type(state) is list:
        for value in state:
            yield from numbers_in(value)
    elif type(state) in (int, bool):
        yield state
    else:
        assert state is None or type(state) is str, f"{type(state)}"


class TestForm:
    def test_plain_containers_that_torch_and_json_read_back(self) -> None:
        state = state_after(4)
        assert by_json(state) == state == by_torch(state)
        assert state["version"] == 1
        assert (state["epoch"], state["step"], state["rank"], state["world_size"]) == (0, 4, 0, 1)
        assert state["settings"]["l_max"] == 64
        assert list(numbers_in(state))

    @pytest.mark.parametrize("alignment", ["matched", "paper"])
    def test_a_few_numbers_per_sample_of_the_window_whatever_the_data_set(self, alignment: Any) -> None:
        sizes = []
        for count in (300, 30_000):
            with make_loader(Lengths([9] * count), num_workers=0, alignment=alignment) as loader:
                states = states_of(loader, 12)
            assert all(len(list(numbers_in(state))) < 5 * 32 + 60 for state in states)
            sizes.append(max(len(json.dumps(state)) for state in states))
        assert sizes[1] < sizes[0] + 200

    def test_the_order_of_all_samples_is_looked_through_once_an_epoch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes: list[int] = []
        monkeypatch.setattr(resume, "checksum_of", lambda views: sizes.append(len(views)) or 1)
        with make_loader(Lengths([9] * 200), num_workers=0) as loader:
            states_of(loader, 12)
        assert sizes == [200]

    def test_indices_of_numpy_and_other_ids_do_not_get_into_it(self) -> None:
        class Words(dict[Any, Any]):
            __getitem__ = dict.__getitem__

        words = Words({("a", i): {"input_ids": torch.full((3 + i,), i)} for i in range(20)})
        with ODBDataLoader(
            words, l_max=25, sampler=list(words), buffer_size=6, num_workers=0, collate_fn=list, num_supervised_fn=len
        ) as loader:
            steps = [batch.step for batch in loader]
            state = steps[2].state_dict()
            list(numbers_in(state))
            loader.load_state_dict(by_json(state))
            assert [batch.step for batch in loader] == steps[3:]


class TestMoments:
    def test_inside_an_accumulation_window_it_is_the_windows_beginning(self) -> None:
        states = whole_of(accumulate=3).states
        assert [state["step"] for state in states[:7]] == [0, 0, 3, 3, 3, 6, 6]
        assert states[0] == states[1]
        assert states[3] == states[2], "the end of a window is the beginning of the next one"

    def test_before_the_first_batch(self) -> None:
        whole = whole_of()
        with loader_of() as loader:
            state = loader.state_dict()
            iterator = iter(loader)
            assert loader.state_dict() == state
            assert facts(next(iterator)) == whole.batches[0], "asking for it changes nothing"
        assert (state["epoch"], state["step"], state["is_finished"]) == (0, 0, False)
        with loader_of() as loader:
            loader.load_state_dict(by_json(state))
            assert [facts(batch) for batch in loader] == whole.batches

    @pytest.mark.parametrize("form", ["default", "accumulate", "non_join", "ended by the trainer"])
    def test_after_the_last_batch_the_next_epoch_follows(self, form: str) -> None:
        whole = whole_of(**FORMS[form])
        with loader_of(**FORMS[form]) as loader:
            list(loader)
            state = loader.state_dict()
        assert (state["epoch"], state["is_finished"]) == (0, True)
        with loader_of(**FORMS[form]) as loader:
            loader.load_state_dict(by_json(state))
            assert loader.state_dict() == state
            assert [facts(batch) for batch in loader] == whole.following

    def test_after_the_last_batch_but_before_the_end_nothing_is_left_of_the_epoch(self) -> None:
        whole = whole_of()
        with loader_of() as loader:
            loader.load_state_dict(whole.states[-1])
            assert list(loader) == []
            assert loader.state_dict()["is_finished"]
            assert [facts(batch) for batch in loader] == whole.following

    def test_after_a_break_it_is_where_the_loop_was_left(self) -> None:
        whole = whole_of()
        with loader_of() as loader:
            for batch in loader:
                if batch.step.step == 5:
                    break
            state = loader.state_dict()
            assert state == whole.states[5]
            loader.load_state_dict(state)
            assert [facts(batch) for batch in loader] == whole.batches[6:]

    def test_when_the_next_epoch_was_begun_after_a_break_it_is_its_beginning(self) -> None:
        with loader_of() as loader:
            for _ in loader:
                break
            iterator = iter(loader)
            state = loader.state_dict()
            assert (state["epoch"], state["step"]) == (1, 0)
            assert next(iterator).step.epoch == 1

    def test_right_after_it_was_loaded_it_is_the_same(self) -> None:
        for state in whole_of(accumulate=2).states:
            with loader_of(accumulate=2) as loader:
                loader.load_state_dict(by_json(state))
                assert loader.state_dict() == state

    def test_iter_twice_before_any_batch_goes_on_all_the_same(self) -> None:
        whole = whole_of()
        with loader_of() as loader:
            loader.load_state_dict(whole.states[3])
            iter(loader)
            abandoned = iter(loader)
            assert [facts(batch) for batch in loader] == whole.batches[4:]
            assert next(abandoned, None) is None

    def test_loading_ends_the_pass_under_way(self) -> None:
        whole = whole_of()
        with loader_of() as loader:
            iterator = iter(loader)
            next(iterator)
            loader.load_state_dict(whole.states[3])
            assert next(iterator, None) is None
            assert [facts(batch) for batch in loader] == whole.batches[4:]

    def test_a_break_in_the_rest_of_an_epoch_leaves_it_for_good(self) -> None:
        whole = whole_of()
        with loader_of() as loader:
            loader.load_state_dict(whole.states[3])
            for _ in loader:
                break
            assert [facts(batch) for batch in loader] == whole.following

    def test_set_epoch_to_that_of_the_state_goes_on_with_it(self) -> None:
        whole = whole_of()
        with loader_of() as loader:
            loader.load_state_dict(whole.states[3])
            loader.set_epoch(0)
            assert [facts(batch) for batch in loader] == whole.batches[4:]
            loader.set_epoch(0)
            assert [facts(batch) for batch in loader] == whole.batches, "it was gone on with once"

    def test_set_epoch_to_another_one_drops_the_state(self) -> None:
        whole = whole_of()
        with loader_of() as loader:
            loader.load_state_dict(whole.states[3])
            loader.set_epoch(1)
            assert [facts(batch) for batch in loader] == whole.following

    def test_a_loop_that_fetches_ahead_takes_that_of_the_batch_trained_last(self) -> None:
        whole = whole_of()
        with loader_of() as loader:
            ahead = [next(iterator) for iterator in [iter(loader)] for _ in range(6)]
            assert loader.state_dict() == whole.states[5]
            state = ahead[2].step.state_dict()
            assert state == whole.states[2]
            loader.load_state_dict(state)
            assert [facts(batch) for batch in loader] == whole.batches[3:]
            assert ahead[2].step.state_dict() == state, "also when the loader is in another epoch"

    def test_an_error_before_the_first_batch_does_not_lose_it(self) -> None:
        whole = whole_of()
        dataset = Augmented(LENGTHS)
        with loader_of(dataset) as loader:
            loader.load_state_dict(whole.states[3])
            lengths, dataset.lengths = dataset.lengths, None  # type: ignore[assignment]
            with pytest.raises((ODBLoaderError, TypeError)):
                next(iter(loader))
            dataset.lengths = lengths
            assert [facts(batch) for batch in loader] == whole.batches[4:]


class TestStepInfo:
    def test_a_copy_has_the_state_and_one_that_was_sent_away_has_none(self) -> None:
        with loader_of() as loader:
            step = next(iter(loader)).step
        for same in (copy.copy(step), copy.deepcopy(step)):
            assert same == step
            assert same.state_dict() == step.state_dict()
        sent = pickle.loads(pickle.dumps(step))
        assert sent == step
        with pytest.raises(RuntimeError, match="was sent to another process, or made there, and has no state"):
            sent.state_dict()

    def test_it_is_written_down_as_before(self) -> None:
        with loader_of() as loader:
            step = next(iter(loader)).step
        assert "position" not in json.dumps(dataclasses.asdict(step))
        assert "position" not in repr(step)
        assert hash(step) == hash(copy.copy(step))

    def test_the_loader_itself_can_be_sent(self) -> None:
        loader = loader_of()
        with loader:
            state = states_of(loader, 4)[-1]
            loader.load_state_dict(state)
        with pickle.loads(pickle.dumps(loader)) as copied:
            assert copied.state_dict() == state


def begin(loader: ODBDataLoader, state: Any) -> None:
    """What of a state can't be gone on with is said here."""
    with loader:
        loader.load_state_dict(state)
        loader.state_dict()


class Shuffled:
    """Another order each time."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(NUMBER))
        random.SystemRandom().shuffle(order)
        return iter(order)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for length in LENGTHS:
            yield {"input_ids": torch.zeros(length, dtype=torch.long)}


def twice_the_length(sample: Any) -> int:
    return 2 * len(sample["input_ids"])


class TestChangedSettings:
    @pytest.mark.parametrize(
        ("changed", "told"),
        [
            ({"l_max": 40}, "l_max was 64 and is 40"),
            ({"buffer_size": 9}, "buffer_size was 16 and is 9"),
            ({"alignment": "paper"}, "alignment was 'matched' and is 'paper'"),
            ({"max_rows": 2}, "max_rows was None and is 2"),
            ({"budget": "quadratic"}, "budget was 'tokens' and is "),
            ({"cost": "quadratic"}, "cost was 'tokens' and is "),
            ({"max_patches": 6, "patches_fn": patches}, "max_patches was None and is 6"),
            ({"oversize": "drop"}, "oversize was 'emit' and is 'drop'"),
            ({"l_max": 40, "buffer_size": 5}, "l_max was 64 and is 40; buffer_size was 16 and is 5"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
    )
    def test_the_rest_is_planned_anew_with_a_warning(self, changed: dict[str, Any], told: str) -> None:
        lengths = [min(length, 30) for length in LENGTHS]
        whole_options: dict[str, Any] = {"dataset": Augmented(lengths)}
        with loader_of(**whole_options) as loader:
            batches = [batch.step for batch in loader]
        for stop in (0, 4, len(batches) - 1):
            trained = [sample_id for step in batches[: stop + 1] for sample_id in step.sample_ids]
            with loader_of(**whole_options, **changed) as loader:
                with pytest.warns(UserWarning, match=f"^the rest of epoch 0 is planned anew: {told}"):
                    loader.load_state_dict(by_json(batches[stop].state_dict()))
                first = loader.state_dict()
                rest = [batch.step for batch in loader]
                assert Counter(trained) + Counter(i for step in rest for i in step.sample_ids) == Counter(range(NUMBER))
                assert [step.step for step in rest] == list(range(stop + 1, stop + 1 + len(rest)))
                assert Counter(loader.stats.resumed_ids) == Counter(trained)
                assert loader.stats.views_expected == NUMBER - len(trained)
                if len(rest) > 2:  # and is gone on with like any other epoch
                    for state, following in ((first, rest), (by_json(rest[1].state_dict()), rest[2:])):
                        with warnings.catch_warnings():
                            warnings.simplefilter("error")
                            loader.load_state_dict(state)
                        assert [batch.step for batch in loader] == following

    def test_once_more(self) -> None:
        """Three budgets in one epoch."""
        trained: list[Any] = []
        state = None
        for l_max in (64, 55, 90):
            with loader_of(l_max=l_max) as loader, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if state is not None:
                    loader.load_state_dict(by_json(state))
                rest = [batch.step for batch in loader]
            assert Counter(trained) + Counter(i for step in rest for i in step.sample_ids) == Counter(range(NUMBER))
            trained += [sample_id for step in rest[:3] for sample_id in step.sample_ids]
            state = rest[2].state_dict()

    def test_between_two_epochs_nothing_is_planned_anew(self) -> None:
        with loader_of() as loader:
            beginning = loader.state_dict()
            list(loader)
            end = loader.state_dict()
        for state, epoch in ((beginning, 0), (end, 1)):
            with warnings.catch_warnings(), loader_of(l_max=70) as loader:
                warnings.simplefilter("error")
                loader.load_state_dict(state)
                assert {batch.step.epoch for batch in loader} == {epoch}

    @pytest.mark.parametrize(
        ("before", "changed", "told"),
        [
            ({}, {"seed": 1}, "seed was 0 when the loader's state was saved and is 1 now"),
            ({}, {"shuffle": False}, "shuffle was True"),
            ({}, {"dataset": Augmented(LENGTHS[:-1])}, r"len\(dataset\) was 44 .* is 43 now"),
            ({}, {"mode": "non_join"}, "mode was 'join' .* is 'non_join' now"),
            ({"mode": "non_join"}, {"quota": 90}, "quota was None .* is 90 now"),
            ({}, {"sampler": range(NUMBER)}, "sampler was 'the default' .* is \"each rank's own\" now"),
            ({}, {"sampler": range(NUMBER), "deal_sampler": True}, "sampler was 'the default' .* is 'dealt out' now"),
            ({"mode": "non_join"}, {"l_max": 40}, "l_max was 64 and is 40: the rest of an epoch can't be planned anew"),
            ({}, {"accumulate": 2}, "step 5 of epoch 0 and was saved with accumulate=1: windows of accumulate=2 steps"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
    )
    def test_others_are_refused_by_name(self, before: dict[str, Any], changed: dict[str, Any], told: str) -> None:
        state = state_after(5, **before)
        with pytest.raises(ValueError, match=told), warnings.catch_warnings():
            warnings.simplefilter("error")
            loader_of(**(before | changed)).load_state_dict(state)

    def test_a_refused_state_leaves_the_loader_as_it_was(self) -> None:
        whole = whole_of()
        with loader_of() as loader:
            iterator = iter(loader)
            next(iterator)
            with pytest.raises(ValueError, match="seed"):
                loader.load_state_dict(state_after(5, seed=1))
            assert [facts(batch) for batch in iterator] == whole.batches[1:]

    def test_other_windows_may_begin_at_a_windows_end(self) -> None:
        whole = whole_of(accumulate=2)
        with loader_of(accumulate=3) as loader:
            loader.load_state_dict(whole.states[5])
            rest = [facts(batch) for batch in loader]
        assert [batch[1:] for batch in rest] == [batch[1:] for batch in whole.batches[6:]]
        assert rest[0][0].window_num_samples == sum(batch[0].num_samples for batch in rest[:3])

    def test_a_trainer_that_accumulates_otherwise_is_found_out_when_the_epoch_begins(self) -> None:
        state = state_after(5)
        with loader_of() as loader:
            loader.load_state_dict(state)
            loader.attach(rank=0, world_size=1, accumulate=2, max_steps=None)
            with pytest.raises(ValueError, match="windows of accumulate=2 steps do not begin there"):
                next(iter(loader))

    def test_a_sampler_with_another_order_each_time_is_refused(self) -> None:
        state = state_after(3, sampler=Shuffled())
        with pytest.raises(ValueError, match=r"the sampler's order is a different one each time .seed it by the epoch"):
            begin(loader_of(sampler=Shuffled()), state)

    def test_a_sampler_with_other_samples_is_refused(self) -> None:
        state = state_after(3, sampler=list(range(30)))
        for other in ([*range(29), 41], [1, 0, *range(2, 30)], list(range(29))):
            with pytest.raises(ValueError, match=rf"rank 0 has {len(other)} samples in epoch 0, which are not the 30 of the"):
                begin(loader_of(sampler=other), state)

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_samples_that_have_other_lengths_are_refused_by_index(self, num_workers: int) -> None:
        with make_loader(Lengths(LENGTHS), num_workers=num_workers) as loader:
            state = states_of(loader, 5)[-1]
        found = state["round"]
        (place, *_), (length, *_) = found["places"], found["lengths"]
        with make_loader(Lengths(LENGTHS)) as loader:
            changed = loader._views(0, 1)[place]
        lengths = [*LENGTHS]
        lengths[changed] += 1
        with make_loader(Lengths(lengths), num_workers=num_workers) as loader:
            loader.load_state_dict(state)
            with pytest.raises(
                ODBLoaderError, match=rf"dataset\[{changed}\].*patches \({length + 1}, 0\) now, and had \({length}"
            ):
                list(loader)

    def test_another_length_function_is_refused(self) -> None:
        state = state_after(5)
        with loader_of(length_fn=twice_the_length) as loader:
            loader.load_state_dict(state)
            with pytest.raises(ODBLoaderError, match="has length and patches"):
                list(loader)

    def test_of_an_iterable_data_set_in_non_join_there_is_none(self) -> None:
        options: dict[str, Any] = {"num_workers": 0, "collate_fn": list, "num_supervised_fn": len, "mode": "non_join"}
        with make_loader(Stream(), quota=30, **options) as loader:
            for ask in (loader.state_dict, next(iter(loader)).step.state_dict, loader.state_dict):
                with pytest.raises(NotImplementedError, match="an iterable data set in non_join has no state"):
                    ask()

    @pytest.mark.filterwarnings("ignore:the iterable data set is read again")
    def test_of_an_iterable_data_set_it_is_for_the_same_world_size(self) -> None:
        options: dict[str, Any] = {"num_workers": 0, "collate_fn": list, "num_supervised_fn": len, "skip_ahead": True}
        with make_loader(Stream(), sharding="loader", **options) as loader:
            (*_, state) = states_of(loader, 3)
        with pytest.raises(ValueError, match="world_size was 1 and is 2: the rest of an epoch can't be planned anew"):
            begin(make_loader(Stream(), sharding="loader", rank=0, world_size=2, **options), state)

    def test_of_another_kind_of_data_set_it_is_refused(self) -> None:
        state = state_after(3)
        with pytest.raises(ValueError, match=r"len\(dataset\) was 44"):
            make_loader(Stream(), num_workers=0, collate_fn=list).load_state_dict(state)


class TestBadStates:
    @pytest.mark.parametrize(
        "state",
        [{}, {"state_dict": {}, "epoch": 3}, ["state"], [None], [{}, {}]],
        ids=["empty", "another", "text", "None", "two"],
    )
    def test_what_is_none_is_refused(self, state: Any) -> None:
        with pytest.raises(ValueError, match="this is no state of an ODBDataLoader, or it is damaged"):
            loader_of().load_state_dict(state)

    def test_an_empty_list_is_refused(self) -> None:
        with pytest.raises(ValueError, match="there is no state to load"):
            loader_of().load_state_dict([])

    def test_another_version_is_refused(self) -> None:
        with pytest.raises(ValueError, match="the loader's state has version 2, and this is known: 1"):
            loader_of().load_state_dict(state_after(3) | {"version": 2})

    def test_one_number_that_was_changed_is_found(self) -> None:
        state, loader = state_after(4), loader_of()
        count = 0
        for damaged in damaged_states(state):
            count += 1
            with pytest.raises(ValueError, match=r"state is damaged: its checksum is not|has version 2"):
                loader.load_state_dict(damaged)
        assert count > 50
        loader.load_state_dict(state)

    @pytest.mark.parametrize("value", [torch.tensor(4), {1, 2}, object()], ids=["tensor", "set", "object"])
    def test_what_is_not_plain_is_found(self, value: Any) -> None:
        with pytest.raises(ValueError, match="state is damaged"):
            loader_of().load_state_dict(state_after(4) | {"step": value})

    def test_a_missing_entry_is_found(self) -> None:
        state = state_after(4)
        del state["round"]
        with pytest.raises(ValueError, match="or it is damaged"):
            loader_of().load_state_dict(state)

    def test_that_of_another_rank_is_refused(self) -> None:
        state = loader_of(rank=1, world_size=2).state_dict()
        begin(loader_of(rank=1, world_size=2), state)
        with pytest.raises(ValueError, match="the loader's state is that of rank 1, and this is rank 0"):
            begin(loader_of(rank=0, world_size=2), state)

    def test_of_several_ranks_each_takes_its_own(self) -> None:
        states = [loader_of(rank=rank, world_size=3).state_dict() for rank in range(3)]
        for rank in range(3):
            loader = loader_of(rank=rank, world_size=3)
            loader.load_state_dict(states)
            assert loader.state_dict() == states[rank]

    def test_those_of_some_ranks_or_in_another_order_are_refused(self) -> None:
        states = [loader_of(rank=rank, world_size=3).state_dict() for rank in range(3)]
        for wrong in (states[:2], states[::-1], [states[0], states[0], states[2]], [*states, states[2]]):
            with pytest.raises(ValueError, match="give one of each rank, in their order"):
                loader_of(rank=0, world_size=3).load_state_dict(wrong)

    def test_those_of_different_moments_or_runs_are_refused(self) -> None:
        def states_at(epoch: int, **options: Any) -> list[State]:
            loaders = [loader_of(rank=rank, world_size=2, **options) for rank in range(2)]
            for loader in loaders:
                loader.set_epoch(epoch)
            return [loader.state_dict() for loader in loaders]

        now = states_at(3)
        for others, told in ((states_at(4), r"epoch is \[3, 4\]"), (states_at(3, l_max=40), "settings is")):
            with pytest.raises(ValueError, match=f"are not of one moment of one run: {told}"):
                loader_of(rank=0, world_size=2).load_state_dict([now[0], others[1]])

    def test_the_beginning_of_an_epoch_is_that_of_any_world_size(self) -> None:
        state = loader_of(rank=1, world_size=2).state_dict()
        whole = whole_of()
        with loader_of() as loader:
            loader.load_state_dict(state)
            assert [facts(batch) for batch in loader] == whole.batches


def damaged_states(state: State) -> Iterator[State]:
    """With each of its numbers changed by one, in turn."""

    def changed(value: Any, put_back: Callable[[Any], State]) -> Iterator[State]:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from changed(item, lambda new, value=value, key=key: put_back(value | {key: new}))  # type: ignore[misc]
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from changed(
                    item,
                    lambda new, value=value, index=index: put_back([*value[:index], new, *value[index + 1 :]]),  # type: ignore[misc]
                )
        elif isinstance(value, bool):
            yield put_back(not value)
        elif isinstance(value, int):
            yield put_back(value + 1)

    yield from changed(state, lambda new: new)


class TestRandomState:
    def test_asking_for_it_draws_no_number_of_the_users(self) -> None:
        """Which would change the run that it is to keep."""
        loader = loader_of(sampler=RandomSampler(range(NUMBER)))
        torch.manual_seed(1)
        loader.state_dict()
        drawn = torch.rand(1)
        torch.manual_seed(1)
        assert torch.equal(torch.rand(1), drawn)
