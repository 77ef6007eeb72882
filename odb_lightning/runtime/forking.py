"""What a forked process can't do if its parent was at it just then."""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta

import torch.distributed as dist

_LIMIT_SECONDS = 10.0


def can_meet_peers() -> bool:
    """Whether this process can look up names and form a group. Not if it was forked while a thread of its parent did one or the
    other, or noted a collective of a Gloo group of its own in torch's flight recorder, as it does for each: the lock was
    inherited, and nobody to open it."""

    def meet_nobody() -> None:
        with contextlib.suppress(OSError):
            socket.gethostbyaddr("127.0.0.1")
        with contextlib.suppress(RuntimeError):  # told where the group is formed in earnest
            dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=_LIMIT_SECONDS))

    thread = threading.Thread(target=meet_nobody, name="odb-fork-check", daemon=True)
    thread.start()
    thread.join(_LIMIT_SECONDS)
    return not thread.is_alive()
