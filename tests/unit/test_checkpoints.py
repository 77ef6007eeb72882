"""Which checkpoints are whole, and how one takes the place of another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from odb_lightning import checkpoints
from odb_lightning.checkpoints import fault_of, newest_whole, ranks_of_zero
from odb_lightning.strategies import whole_checkpoints
from odb_lightning.strategies.whole_checkpoints import _can_be_replaced, put_in_place


def single(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {"weight": torch.zeros(100)}}, path)
    return path


def of_zero(path: Path, ranks: int, stage: int = 2) -> Path:
    below = path / "checkpoint"
    below.mkdir(parents=True)
    for rank in range(ranks):
        if rank == 0 or stage == 3:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save({"module": {"weight": torch.zeros(9)}, "dp_world_size": ranks, "mp_world_size": 1}, below / name)
        if stage:
            torch.save({"optimizer_state_dict": torch.zeros(9)}, below / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (path / "latest").write_text("checkpoint")
    return path


def of_shards(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        (path / name).write_bytes(b"content")
    torch.save({"epoch": 0}, path / "meta.pt")
    return path


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-30])


def test_a_single_file_is_whole_or_cut_off(tmp_path: Path) -> None:
    file = single(tmp_path / "last.ckpt")
    assert fault_of(file) is None
    cut_off(file)
    assert fault_of(file) == "last.ckpt is cut off"
    assert "was being written" in str(fault_of(single(tmp_path / "last.ckpt.part")))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_folder_of_deepspeed_has_the_files_of_all_ranks(stage: int, tmp_path: Path) -> None:
    folder = of_zero(tmp_path / "last.ckpt", 3, stage)
    assert fault_of(folder) is None
    assert list(ranks_of_zero(folder)) == ([0, 1, 2] if stage else [])
    if stage:
        last = folder / "checkpoint" / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
        cut_off(last)
        assert fault_of(folder) == f"{last.name} is cut off"
        last.unlink()
        assert fault_of(folder) == "the files of ranks 2 are missing"
    for model in folder.glob("checkpoint/*model_states.pt"):
        model.unlink()
    assert fault_of(folder) == "the file of the model is missing"
    (folder / "latest").unlink()
    assert fault_of(folder) is not None


def test_a_folder_of_shards_has_their_list_and_the_rest_of_the_state(tmp_path: Path) -> None:
    folder = of_shards(tmp_path / "last.ckpt")
    assert fault_of(folder) is None
    cut_off(folder / "meta.pt")
    assert fault_of(folder) == "meta.pt is cut off"
    (folder / ".metadata").unlink()
    assert fault_of(folder) == "the list of its parts is missing"


def test_the_newest_whole_one_of_all_runs_is_found(tmp_path: Path) -> None:
    made = [
        single(tmp_path / "runs" / "1" / "checkpoints" / "last.ckpt"),
        of_zero(tmp_path / "multiruns" / "2" / "0" / "checkpoints" / "last.ckpt.old", 2),
        single(tmp_path / "runs" / "3" / "checkpoints" / "update=3.ckpt"),
        of_zero(tmp_path / "runs" / "3" / "checkpoints" / "update=6.ckpt.part", 2),
    ]
    cut_off(made[2])
    for when, path in enumerate(made):
        for part in (path, path / "latest"):
            if part.exists():
                os.utime(part, (when, when))
    os.utime(made[1], (9, 9))  # as if something was removed from it since
    newest, passed = newest_whole(tmp_path)
    assert newest == made[1]
    assert passed == [f"{made[3]}: it was being written when its run ended", f"{made[2]}: update=3.ckpt is cut off"]
    assert newest_whole(tmp_path / "runs" / "3") == (None, [])


@pytest.mark.parametrize("make", [single, of_shards])
@pytest.mark.parametrize("make_before", [None, single, of_shards])
def test_a_checkpoint_takes_the_place_of_another(make, make_before, tmp_path: Path) -> None:
    path, part = tmp_path / "last.ckpt", make(tmp_path / "last.ckpt.part")
    content = part.stat().st_ino
    if make_before is not None:
        make_before(path)
    put_in_place(part, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"] and path.stat().st_ino == content


@pytest.mark.parametrize("replacements", [0, 1])
def test_one_of_them_is_whole_wherever_a_folder_is_interrupted(replacements: int, tmp_path: Path, monkeypatch) -> None:
    task, replace, calls = tmp_path, os.replace, []

    def interrupted(*arguments: Path) -> None:
        if len(calls) == replacements:
            raise KeyboardInterrupt
        calls.append(arguments)
        replace(*arguments)

    folder = task / "runs" / "1" / "checkpoints"
    of_zero(folder / "last.ckpt", 2)
    part = of_zero(folder / "last.ckpt.part", 2)
    monkeypatch.setattr(whole_checkpoints.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put_in_place(part, folder / "last.ckpt")
    newest, passed = checkpoints.newest_whole(task)
    assert newest is not None and newest.name == ("last.ckpt.old" if replacements else "last.ckpt") and len(passed) == 1
    monkeypatch.undo()
    put_in_place(part, folder / "last.ckpt")
    assert [entry.name for entry in folder.iterdir()] == ["last.ckpt"]


def test_a_folder_with_other_things_in_it_is_no_checkpoint_to_replace(tmp_path: Path) -> None:
    places = [single(tmp_path / "1"), of_zero(tmp_path / "2", 2), of_shards(tmp_path / "3"), tmp_path / "none"]
    assert all(_can_be_replaced(place) for place in places)
    (places[1] / "notes.txt").write_text("mine")
    assert not _can_be_replaced(places[1]) and not _can_be_replaced(tmp_path)
