"""What all tests want of the process that runs them, before it looks up a name or starts a process."""

from __future__ import annotations

import os

# torch looks up a name for each connection: a name server that drops a question must not hold up a test for 5 s. Read at the
# first look-up of a process, and not again.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
if "PYTEST_XDIST_WORKER" in os.environ and os.getpgrp() != os.getpid():
    os.setpgid(0, 0)  # the tests that look for processes left behind look among those of their own group
