"""What is left of a loader's processes: for tests that start some."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers import running_members

_GRACE_SECONDS = 8.0


def runs(pid: int) -> bool:
    """Whether there is such a process that is not a zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def all_end(pids: Iterable[int], seconds: float = _GRACE_SECONDS) -> bool:
    """Whether none of the processes runs any more within `seconds`."""
    deadline = time.monotonic() + seconds
    remaining = list(pids)
    while remaining := [pid for pid in remaining if runs(pid)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _is_multiprocessings_own(pid: int) -> bool:
    # The resource tracker and the fork server serve this process as long as it lives.
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_text()
        return "resource_tracker" in command or "from multiprocessing.forkserver import main" in command
    return True


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    """Fails a test that leaves a process behind in this process group, whoever its parent is by now."""
    before = set(running_members(os.getpgrp()))
    yield
    left = [pid for pid in running_members(os.getpgrp()) if pid not in before and not _is_multiprocessings_own(pid)]
    assert all_end(left), f"left behind: {[pid for pid in left if runs(pid)]}"
