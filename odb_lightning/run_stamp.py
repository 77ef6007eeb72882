"""One name for a run, agreed by all its ranks: each rank composes its configuration by itself, at a time of its own."""

from __future__ import annotations

import os
from datetime import datetime, timedelta

_AGREEMENT_SECONDS = 60
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


def global_rank() -> int:
    """This process's rank as its launcher's environment has it; 0 where none started it."""
    for name in _RANK_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def only_on_rank_zero(value: str) -> str | None:
    """`value` on rank 0, else None: for settings that name a file which one rank alone should write."""
    return value if global_rank() == 0 else None


def rank_suffix() -> str:
    """What tells apart the log files of ranks that share a folder: "" on rank 0, else ".rank<r>"."""
    rank = global_rank()
    return f".rank{rank}" if rank else ""


def run_stamp(pattern: str = "%Y-%m-%d_%H-%M-%S") -> str:
    """The start of the run in `pattern` (as `strftime` has it), the same on all its ranks.

    Ranks that torchrun started agree through the store that its agent serves; a SLURM job's share its id and the
    variable `ODB_RUN_STAMP` overrides all of it. Ranks started by Lightning are told their folder by rank 0.
    """
    fixed = os.environ.get("ODB_RUN_STAMP")
    if fixed:
        return fixed
    own = datetime.now().strftime(pattern)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _agree_through_agent(own)
    if os.environ.get("SLURM_NTASKS", "1") != "1" and "SLURM_JOB_ID" in os.environ:
        return f"slurm-{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_STEP_ID', '0')}"
    return own


def _agree_through_agent(own: str) -> str:
    from torch.distributed import TCPStore

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_AGREEMENT_SECONDS),
    )
    # Whoever comes first decides; a restarted rank of the same job finds the folder that it had.
    return store.compare_set("odb_lightning/run_stamp", "", own).decode()
