"""A small batch for a rank to take part in collectives with while it is idle."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from odb_lightning.runtime.codec import decode, encode
from odb_lightning.runtime.exchange import Exchange
from odb_lightning.runtime.ring import BatchSender

_MAX_CANDIDATES = 4


class StandIn:
    """One sample of this rank, collated alone; of a peer, where this rank never had one. Kept over epochs."""

    def __init__(self, collate: Callable[[list[Any]], Any], count_targets: Callable[[Any, int], float]) -> None:
        self._collate = collate
        self._count_targets = count_targets
        self._batch: Any = None
        self._has_batch = False
        self._has_targets = False
        self._is_sent = False
        self._has_asked = False

    def begin_epoch(self) -> None:
        """Peers may be asked again."""
        self._has_asked = False

    @property
    def is_wanting(self) -> bool:
        """A stand-in with targets is missing, and peers were not asked for one in this epoch."""
        return not self._has_targets and not self._has_asked

    def candidates(self, samples: Sequence[Any]) -> list[Any]:
        """Copies of the shortest samples of a group (it holds the longest first), made before `collate_fn` can alter
        them; none once there is a stand-in with targets."""
        return [] if self._has_targets else [copy.deepcopy(sample) for sample in reversed(samples[-_MAX_CANDIDATES:])]

    def consider(self, candidates: Sequence[Any]) -> None:
        """Takes the first candidate that has targets by itself; failing that, the first as long as there is nothing."""
        for sample in candidates:
            batch = self._collate([sample])
            has_targets = self._count_targets(batch, 1) > 0
            if has_targets or not self._has_batch:
                self._batch, self._has_batch, self._has_targets, self._is_sent = batch, True, has_targets, False
            if has_targets:
                return

    def share(self, exchange: Exchange) -> None:
        """Every rank takes part: one that has none with targets gets the stand-in of the lowest rank with the best one."""
        self._has_asked = True
        quality = 2 if self._has_targets else int(self._has_batch)
        best = exchange.all_reduce_max([quality * exchange.world_size + exchange.world_size - 1 - exchange.rank])[0]
        source = exchange.world_size - 1 - best % exchange.world_size
        payload = None
        if source == exchange.rank:
            header, buffers = encode(self._batch)
            payload = pickle.dumps((header, buffers))
        received = exchange.broadcast(payload, source)
        best_has_targets = best // exchange.world_size == 2
        if not self._has_batch or (best_has_targets and not self._has_targets):
            self._batch, self._has_batch, self._is_sent = decode(*pickle.loads(received)), True, False
            self._has_targets = best_has_targets

    def send_once(self, sender: BatchSender) -> None:
        """Hands the stand-in to the training process before its first idle step, and again if a better one was found."""
        if not self._is_sent:
            sender.send("stand_in", None, self._batch)
            self._is_sent = True
