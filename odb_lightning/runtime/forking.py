"""What a forked process can't do if its parent was at it just then."""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def can_meet_peers(limit: float) -> bool:
    """Whether this process can look up names, form a group and reduce within `limit` seconds.

    Not if it was forked while another thread of its parent held a lock on one of these: that on names, or those on torch's
    flight recorder and its register of work, which a Gloo group takes for each collective. The lock was inherited, and nobody
    to open it.
    """
    gloo: Any = dist.ProcessGroupGloo

    def meet_nobody() -> None:
        with contextlib.suppress(OSError):
            socket.gethostbyaddr("127.0.0.1")
        with contextlib.suppress(RuntimeError):  # told where the group is formed in earnest
            options = gloo._Options()
            options._timeout = timedelta(seconds=limit)
            # By itself Gloo looks up this host's name, which may be slow.
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            gloo(dist.HashStore(), 0, 1, options).allreduce([torch.zeros(1)]).wait()

    thread = threading.Thread(target=meet_nobody, name="odb-fork-check", daemon=True)
    thread.start()
    thread.join(limit)
    return not thread.is_alive()
