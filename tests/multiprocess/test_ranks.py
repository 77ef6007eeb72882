"""What `run_ranks` says of ranks that hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.ranks import run_ranks

pytestmark = pytest.mark.timeout(60)


def test_ranks_that_hang_show_where(tmp_path: Path) -> None:
    run_ranks("os:getpid", 1, tmp_path)  # or the imports of the process that forks ranks count
    with pytest.raises(pytest.fail.Exception, match="not done in time") as caught:
        run_ranks("signal:pause", 2, tmp_path, seconds=5)
    assert str(caught.value).count("in _be_a_rank") == 2
