"""The loader on several ranks, with real processes: the groups that simulated ranks form, the same numbers on each rank, and
failures that reach all of them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from odb_lightning import ShardedSampler
from odb_lightning.plan import RoundPlanner, simulate_ranks
from tests.multiprocess import loader_cases
from tests.multiprocess.loader_cases import FORMS, LENGTHS, NON_JOIN_FORMS, Form, guarded
from tests.multiprocess.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(250)]

RANKS = [1, 2, 4]
NOTICED_SECONDS = 30.0
"""Within which every rank has to know of a failure of any. The loaders' limit on forming the group is 20 s, and one that fails
at that very moment is noticed by it; their other limits are longer."""

ITERABLES = [("loader", 2), ("loader", 0), ("dataset", 2), ("hugging face", 2), ("hugging face", 0)]
ALL = [[f"form {name}", "run_form", {"name": name}] for name in FORMS] + [
    *[[f"non-join {name}", "run_form", {"name": name, "joins": False}] for name in NON_JOIN_FORMS],
    *[[f"iterable {how} {n}", "iterable", {"how": how, "num_workers": n}] for how, n in ITERABLES],
    ["breaks", "breaks_everywhere", {}],
    ["train and val", "train_and_val", {}],
    ["slow", "slow_rank", {}],
    ["draws 1", "random_draws", {"num_workers": 1}],
    ["draws 0", "random_draws", {"num_workers": 0}],
]
FAILURES = [
    ["fails raise", "fails_on_rank_1", {"how": "raise"}],
    ["fails raise 0", "fails_on_rank_1", {"how": "raise", "num_workers": 0}],
    ["fails length", "fails_on_rank_1", {"how": "length"}],
    ["fails collate", "fails_on_rank_1", {"how": "collate"}],
    ["worker killed", "fails_on_rank_1", {"how": "kill"}],
    ["collator killed", "fails_on_rank_1", {"how": "kill", "num_workers": 0}],
    ["l_max", "knobs_differ", {"name": "l_max", "values": [64, 65]}],
    ["buffer_size", "knobs_differ", {"name": "buffer_size", "values": [16, 8]}],
    ["accumulate", "knobs_differ", {"name": "accumulate", "values": [1, 3]}],
    *[[f"other {how}", "data_knobs_differ", {"how": how}] for how in ("length", "deal_sampler", "sharding", "workers")],
    ["raises alone", "leaves_alone", {"how": "raise", "rank_that_leaves": 1}],
    ["breaks alone", "leaves_alone", {"how": "break", "rank_that_leaves": 0}],
    ["after failures", "run_form", {"name": "default"}],
]
CASES = {
    2: [*ALL, ["store", "in_a_store_of_the_users_own", {}], ["shortest", "shortest_stand_in", {}], *FAILURES],
    4: [*ALL, ["stand-ins", "stand_ins", {}], *FAILURES],
}
VICTIMS = {2: [1, 0], 4: [2]}


class Ranks:
    """The results of all cases on all ranks; the ranks run them once."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._alone: dict[str, Any] | None = None
        self._several: list[dict[str, Any]] | None = None

    def __call__(self, world_size: int, name: str) -> list[Any]:
        results = [rank[name] for rank in (self._run_alone() if world_size == 1 else self._run_several(world_size))]
        for rank, result in enumerate(results):
            assert not (isinstance(result, dict) and "exception" in result), f"rank {rank}:\n{result['exception']}"
        return results

    def _run_alone(self) -> list[dict[str, Any]]:
        if self._alone is None:
            self._alone = {name: guarded(getattr(loader_cases, function), **arguments) for name, function, arguments in ALL}
        return [self._alone]

    def _run_several(self, world_size: int) -> list[dict[str, Any]]:
        if self._several is None:
            results = run_ranks(
                "tests.multiprocess.loader_cases:run_cases",
                max(CASES),
                self._folders.mktemp("ranks"),
                seconds=240,
                cases=CASES,
                victims=VICTIMS,
            )
            self._several = [result.value for result in results]
        return [values[str(world_size)] for values in self._several[:world_size]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory)


def shards_of(form: Form, world_size: int, epoch: int) -> list[list[int]]:
    if form.shards is not None:
        return [list(shard) for shard in (*form.shards, *[()] * world_size)[:world_size]]
    shards = []
    for rank in range(world_size):
        sampler = ShardedSampler(len(form.lengths), rank=rank, world_size=world_size, shuffle=form.shuffle, seed=form.seed)
        sampler.set_epoch(epoch)
        shards.append(list(sampler))
    return shards


def kept(form: Form, index: int) -> bool:
    """Whether no policy drops this sample."""
    return 0 < form.lengths[index] <= (form.l_max if form.oversize == "drop" else max(form.lengths))


def simulated(form: Form, world_size: int, epoch: int) -> list[list[list[int]]]:
    """Per step and rank, the ids of the samples: from lengths alone, in this process."""
    shards = [[index for index in shard if kept(form, index)] for shard in shards_of(form, world_size, epoch)]

    def planner(_: int) -> RoundPlanner:
        return RoundPlanner(
            l_max=form.l_max,
            buffer_size=form.buffer_size,
            max_rows=form.max_rows,
            order_seed=f"{form.seed}/{epoch}" if form.shuffle else None,
            joins=form.mode == "join",
        )

    quota = form.quota or sum(len(shard) for shard in shards_of(form, world_size, epoch))
    run = simulate_ranks([[form.lengths[index] for index in shard] for shard in shards], planner, quota=quota)
    return [[[shards[rank][position] for position in group] for rank, group in enumerate(step)] for step in run.steps]


def groups(results: list[Any], epoch: int, key: str = "steps") -> list[list[list[int]]]:
    """Per step and rank, the ids of the samples: as the real ranks trained on them."""
    per_rank = [[step["sample_ids"] for step in result[key] if step["epoch"] == epoch] for result in results]
    assert len({len(steps) for steps in per_rank}) == 1, "the same number of steps on all ranks"
    return [list(step) for step in zip(*per_rank, strict=True)]


def check_numbers(form: Form, results: list[Any], world_size: int) -> None:
    """What each step says of itself, of all ranks, and of its window."""
    for number, step in enumerate(zip(*(result["steps"] for result in results), strict=True)):
        for key in ("epoch", "step", "global_num_samples", "global_num_tokens_supervised", "num_active_ranks"):
            assert len({info[key] for info in step}) == 1, f"{key} of step {number} differs between ranks"
        assert step[0]["global_num_samples"] == sum(info["num_samples"] for info in step)
        assert step[0]["global_num_tokens_supervised"] == sum(info["num_tokens_supervised"] for info in step)
        assert step[0]["num_active_ranks"] == sum(not info["is_idle"] for info in step) > 0
        for info in step:
            lengths = [form.lengths[index] for index in info["sample_ids"]]
            assert (info["num_samples"], info["num_tokens_real"], info["max_length"]) == (
                len(lengths),
                sum(lengths),
                max(lengths, default=0),
            )
            assert info["num_tokens_padded"] == len(lengths) * max(lengths, default=0)
            assert (info["world_size"], info["accumulate"], info["is_idle"]) == (world_size, form.accumulate, not lengths)
            if info["is_idle"]:
                assert info["data"] == "IDLE_DATA"
                assert info["num_tokens_supervised"] == 0
            else:
                assert info["data"]["ids"] == info["sample_ids"]
                assert info["data"]["targets"] == info["num_tokens_supervised"]
    for result in results:
        for epoch in {info["epoch"] for info in result["steps"]}:
            steps = [info for info in result["steps"] if info["epoch"] == epoch]
            for start in range(0, len(steps), form.accumulate):
                window = steps[start : start + form.accumulate]
                for part, whole in (
                    ("global_num_samples", "window_num_samples"),
                    ("global_num_tokens_supervised", "window_num_tokens_supervised"),
                ):
                    assert {info[whole] for info in window} == {sum(info[part] for info in window)}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("world_size", RANKS)
def test_real_ranks_form_the_groups_of_simulated_ranks(ranks: Ranks, world_size: int, name: str) -> None:
    form, results = FORMS[name], ranks(world_size, f"form {name}")
    for epoch in range(2):
        assert groups(results, epoch) == simulated(form, world_size, epoch)
        emitted = sorted(index for step in groups(results, epoch) for group in step for index in group)
        assert emitted == sorted(index for shard in shards_of(form, world_size, epoch) for index in shard if kept(form, index))
    check_numbers(form, results, world_size)
    for rank, result in enumerate(results):
        views = [index for epoch in range(2) for index in shards_of(form, world_size, epoch)[rank]]
        assert result["stats"]["views_expected"] == len(views)
        assert result["stats"]["dropped_ids"] == [index for index in views if not kept(form, index)]


@pytest.mark.parametrize("name", NON_JOIN_FORMS)
@pytest.mark.parametrize("world_size", RANKS)
def test_real_ranks_of_non_join_form_the_groups_of_simulated_ranks(ranks: Ranks, world_size: int, name: str) -> None:
    form, results = NON_JOIN_FORMS[name], ranks(world_size, f"non-join {name}")
    shards = shards_of(form, world_size, 0)
    quota = form.quota or sum(map(len, shards))
    for epoch in range(2):
        steps = groups(results, epoch)
        assert steps == simulated(form, world_size, epoch)
        sizes = [sum(map(len, step)) for step in steps]
        assert quota <= sum(sizes) < quota + max(sizes, default=1)
        for shard, emitted in zip(shards, zip(*steps, strict=True), strict=False):
            assert {index for group in emitted for index in group} <= set(shard)
    check_numbers(form, results, world_size)
    passes = [result["stats"]["passes"] for result in results]
    assert len(results) == 1 or name not in ("24-and-5", "quota") or max(passes) > 2, "in two epochs"


@pytest.mark.parametrize(("how", "num_workers"), ITERABLES)
@pytest.mark.parametrize("world_size", RANKS)
def test_each_sample_of_an_iterable_data_set_is_trained_once(ranks: Ranks, world_size: int, how: str, num_workers: int) -> None:
    """C08"""
    results = ranks(world_size, f"iterable {how} {num_workers}")
    identities = {}
    for epoch in range(2):
        groups(results, epoch)  # the same number of steps on all ranks
        steps = [step for result in results for step in result["steps"] if step["epoch"] == epoch and not step["is_idle"]]
        trained = [
            (index, str(sample_id))
            for step in steps
            for index, sample_id in zip(step["data"]["ids"], step["sample_ids"], strict=True)
        ]
        assert sorted(index for index, _ in trained) == list(range(len(LENGTHS) - 1)), "the last one is empty"
        assert len({sample_id for _, sample_id in trained}) == len(trained), "identities are unique over all ranks"
        assert identities.setdefault("first", dict(trained)) == dict(trained), "and the same in each epoch"
    assert sum(result["expected"] for result in results) == 2 * len(LENGTHS)


def test_fewer_samples_than_ranks_is_one_step_with_an_idle_rank(ranks: Ranks) -> None:
    """C05"""
    results = ranks(4, "form 5-6-7")
    for epoch in range(2):
        (step,) = groups(results, epoch)
        assert sorted(map(len, step)) == [0, 1, 1, 1]
    assert {result["steps"][0]["num_active_ranks"] for result in results} == {3}


@pytest.mark.parametrize(
    ("world_size", "name", "idle"), [(2, "8-and-2", [0, 6]), (4, "8-and-2", [0, 6, 4, 4]), (4, "4-4-8-4", [4, 4, 0, 4])]
)
def test_unequal_shards_give_equal_steps_and_idle_ones(ranks: Ranks, world_size: int, name: str, idle: list[int]) -> None:
    """C16"""
    results = ranks(world_size, f"form {name}")
    assert [sum(step["is_idle"] for step in result["steps"] if step["epoch"] == 0) for result in results] == idle
    assert {len(result["steps"]) for result in results} == {16}


@pytest.mark.parametrize("world_size", RANKS)
def test_a_remainder_is_not_dropped(ranks: Ranks, world_size: int) -> None:
    """C04"""
    results = ranks(world_size, "form 10-short-1-long")
    assert sorted(index for step in groups(results, 0) for group in step for index in group) == list(range(11))


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_idle_step_has_a_stand_in_with_targets(ranks: Ranks, world_size: int) -> None:
    for name in ("unequal", "first-is-empty", "8-and-2", "5-6-7"):
        idle = [step for result in ranks(world_size, f"form {name}") for step in result["steps"] if step["is_idle"]]
        assert idle or (name, world_size) == ("5-6-7", 2)
        for step in idle:
            assert step["stand_in"]["targets"] > 0
            assert step["stand_in"]["shape"][0] == 1


class TestStandIns:
    def idle_steps(self, ranks: Ranks, rank: int) -> list[Any]:
        return [step for step in ranks(4, "stand-ins")[rank]["steps"] if step["is_idle"]]

    def test_a_rank_has_its_own(self, ranks: Ranks) -> None:
        steps = self.idle_steps(ranks, 1)
        assert len(steps) == 10
        assert {tuple(step["stand_in"]["ids"]) for step in steps} == {(6,)}, (
            "fresh in each step, whatever was done to the one before"
        )

    def test_a_rank_that_never_had_a_sample_gets_a_peers(self, ranks: Ranks) -> None:
        steps = self.idle_steps(ranks, 2)
        assert len(steps) == 12
        assert len({tuple(step["stand_in"]["ids"]) for step in steps}) == 1
        assert steps[0]["stand_in"]["ids"][0] in range(7)
        assert all(step["stand_in"]["targets"] > 0 for step in steps)

    def test_a_rank_that_never_had_a_target_gets_a_peers(self, ranks: Ranks) -> None:
        steps = self.idle_steps(ranks, 3)
        assert len(steps) == 10
        assert all(step["stand_in"]["targets"] > 0 for step in steps)

    def test_it_is_the_shortest_of_its_group_that_has_targets(self, ranks: Ranks) -> None:
        """Lengths 8, 4 and 3, of which three tokens are masked."""
        steps = ranks(2, "shortest")[0]["steps"]
        assert [step["sample_ids"] for step in steps if not step["is_idle"]] == [[3, 4, 1], [2], [0]]
        idle = [step for step in steps if step["is_idle"]]
        assert idle
        assert {tuple(step["stand_in"]["ids"]) for step in idle} == {(4,)}
        assert {step["stand_in"]["targets"] for step in idle} == {1}


@pytest.mark.parametrize("world_size", RANKS)
def test_a_break_on_all_ranks_and_a_new_epoch(ranks: Ranks, world_size: int) -> None:
    assert groups(ranks(world_size, "breaks"), 2) == simulated(FORMS["default"], world_size, 2)


@pytest.mark.parametrize("world_size", RANKS)
def test_training_and_validation_in_turns(ranks: Ranks, world_size: int) -> None:
    results = ranks(world_size, "train and val")
    for epoch in range(2):
        assert groups(results, epoch, "train") == simulated(FORMS["default"], world_size, epoch)
    for number in range(4):
        validated = [{"steps": result["val"][number]} for result in results]
        assert groups(validated, number) == simulated(FORMS["in-order"], world_size, number)


@pytest.mark.parametrize("world_size", RANKS)
def test_a_slow_rank_does_not_change_the_batches(ranks: Ranks, world_size: int) -> None:
    assert groups(ranks(world_size, "slow"), 0) == simulated(FORMS["default"], world_size, 0)


@pytest.mark.parametrize("world_size", RANKS)
def test_random_draws_do_not_depend_on_workers_and_differ_between_ranks(ranks: Ranks, world_size: int) -> None:
    ours, theirs = ranks(world_size, "draws 0"), ranks(world_size, "draws 1")
    assert ours == theirs
    batches = [batch for rank in ours for batch in rank]
    assert len({tuple(drawn) for _, data in batches for drawn in data["drawn"]}) == 40
    assert len({data["by_collate"] for _, data in batches}) == len(batches)


def test_ranks_can_meet_in_a_store_of_the_users_own(ranks: Ranks) -> None:
    results = ranks(2, "store")
    assert [groups(results, epoch) for epoch in range(2)] == [simulated(FORMS["default"], 2, epoch) for epoch in range(2)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_can_meet_without_torch_distributed(ranks: Ranks, world_size: int) -> None:
    results = ranks(world_size, "explicit")
    assert all(result["clean"] for result in results)
    steps = [result["result"] for result in results]
    assert [groups(steps, epoch) for epoch in range(2)] == [
        simulated(FORMS["default"], world_size, epoch) for epoch in range(2)
    ]


class TestFailures:
    def check(self, result: Any, *patterns: str) -> None:
        assert result["error"] is not None, "the epoch ended as if nothing had happened"
        for pattern in patterns:
            assert re.search(pattern, result["error"]), result["error"]
        assert result["seconds"] < NOTICED_SECONDS
        assert result["clean"], "a process is left"

    @pytest.mark.parametrize(
        ("name", "where"),
        [
            ("fails raise", r"dataset\[37\]"),
            ("fails raise 0", r"dataset\[37\]"),
            ("fails length", r"length_fn for dataset\[37\]"),
            ("fails collate", r"collate_fn for samples \[.*\b37\b.*\]"),
        ],
    )
    @pytest.mark.parametrize("world_size", [2, 4])
    def test_an_error_of_one_rank_is_told_on_all(self, ranks: Ranks, world_size: int, name: str, where: str) -> None:
        for result in ranks(world_size, name):
            assert result["type"] == "ODBLoaderError"
            self.check(
                result,
                rf"rank 1 failed in {where}: .*UserError: bad sample 37\n",
                "Original traceback on rank 1",
                r"raise UserError\(",
            )

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_a_killed_worker_is_told_on_all(self, ranks: Ranks, world_size: int) -> None:
        for result in ranks(world_size, "worker killed"):
            self.check(result, r"rank 1 failed.*worker.*(killed by signal|exited unexpectedly)")

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_a_killed_collate_process_ends_all(self, ranks: Ranks, world_size: int) -> None:
        for rank, result in enumerate(ranks(world_size, "collator killed")):
            told = "" if rank == 1 else "^a peer ended this iteration: rank 1 failed in its loader: "
            self.check(result, told + "the collate process of rank 1 ended unexpectedly with exit code -9")

    @pytest.mark.parametrize("victim", [0, 1])
    def test_a_killed_rank_ends_all(self, ranks: Ranks, victim: int) -> None:
        """Rank 0 holds the store in which the ranks meet."""
        self.check_killed(ranks(2, f"killed {victim}"), victim)

    def test_a_killed_rank_of_four_ends_all(self, ranks: Ranks) -> None:
        self.check_killed(ranks(4, "killed 2"), 2)

    def check_killed(self, results: list[Any], victim: int) -> None:
        for rank, result in enumerate(results):
            assert result["clean"], f"rank {rank} left a process"
            if rank == victim:
                assert result["result"] is None
            else:
                gone = f"rank {victim} failed in its training process: it is gone without a word"
                # The store in which rank 0 could leave a word is gone with it.
                lost = r"lost the collate process of .*the store of the job is gone, too, which rank 0 holds"
                self.check(result["result"], f"{gone}|{lost}" if victim == 0 else gone)

    @pytest.mark.parametrize(
        ("name", "values"),
        [("l_max", (64, 65)), ("buffer_size", (16, 8)), ("accumulate", (1, 3))],
        ids=["l_max", "buffer_size", "accumulate"],
    )
    @pytest.mark.parametrize("world_size", [2, 4])
    def test_other_options_on_another_rank_are_named_on_all(
        self, ranks: Ranks, world_size: int, name: str, values: tuple[int, int]
    ) -> None:
        for result in ranks(world_size, name):
            self.check(result, rf"{name} is {values[1]} on rank [13] and {values[0]} on rank 0")

    @pytest.mark.parametrize(
        ("how", "told"),
        [
            ("length", r"len\(dataset\) is 59 on rank 1 and 60 on rank 0"),
            ("deal_sampler", "deal_sampler is True on rank 1 and False on rank 0"),
            ("sharding", "sharding is 'dataset' on rank 1 and 'loader' on rank 0"),
            ("workers", "num_workers is 2 on rank 1 and 1 on rank 0"),
        ],
    )
    @pytest.mark.parametrize("world_size", [2, 4])
    def test_other_data_on_another_rank_is_named_on_all(self, ranks: Ranks, world_size: int, how: str, told: str) -> None:
        """The training process of a loader without workers reads alone, as one worker does."""
        for result in ranks(world_size, f"other {how}"):
            self.check(result, f"rank 1 failed in comparing the loader's options .*{told}; every rank has to be given the same")

    @pytest.mark.parametrize(("name", "leaver"), [("raises alone", 1), ("breaks alone", 0)])
    @pytest.mark.parametrize("world_size", [2, 4])
    def test_a_rank_that_leaves_alone_ends_the_others(self, ranks: Ranks, world_size: int, name: str, leaver: int) -> None:
        for rank, result in enumerate(ranks(world_size, name)):
            if rank != leaver:
                self.check(result, rf"rank {leaver} \(round \d+ of epoch 0\).* left the iteration before its end")
            elif name == "raises alone":
                assert result["type"] == "RuntimeError"
            else:
                assert (result["error"], result["batches"]) == (None, 4)

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_after_failures_the_ranks_can_load_again(self, ranks: Ranks, world_size: int) -> None:
        assert groups(ranks(world_size, "after failures"), 1) == simulated(FORMS["default"], world_size, 1)
