"""A script of the usual form works under start methods that import it again in each process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers import run_command

SCRIPT = """
import sys

import torch

from odb_lightning import ODBDataLoader, ODBDataModule, ODBDDPStrategy


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"input_ids": torch.full((index + 1,), index)}


def collate(samples):
    return {"input_ids": torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)}


if __name__ == "__main__":
    with ODBDataLoader(Samples(), l_max=40, collate_fn=collate, num_workers=0, multiprocessing_context=sys.argv[1]) as loader:
        print("SEEN", sum(batch.step.num_samples for batch in loader))
"""


@pytest.mark.distributed
@pytest.mark.parametrize("method", ["spawn"])
def test_a_script_with_the_import_on_top(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run_command([sys.executable, str(script), method], cwd=tmp_path, seconds=100)
    assert result.status == 0, result.output
    assert "SEEN 20" in result.output
