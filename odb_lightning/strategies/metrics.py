"""torchmetrics in an idle step: they take part in collectives, and count nothing.

Reads private attributes of torchmetrics (`_to_sync`, `_update_count`, `_computed`, `_forward_cache`, and of collections
`_groups_checked`, `_enable_compute_groups`), which have no public counterpart; `tests/traps` holds what this relies on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

OF_ANY_MODULE = frozenset(vars(nn.Module()))
"""Attributes."""
_CONTAINERS = (list, dict, set, deque)


@contextmanager
def counting_nothing(module: nn.Module, is_idle: Callable[[], bool]) -> Iterator[None]:
    """Inside, an `update` or a call of a metric in `module` is put back at once, if `is_idle`. So `compute` and syncs act on
    what was counted before, as on the other ranks, and a `reset` stays."""
    in_call: Counter[int] = Counter()
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, Metric):
                stack.enter_context(_PutBack(part, in_call, is_idle).in_place())
            elif isinstance(part, MetricCollection) and not part._groups_checked:
                stack.enter_context(_without_groups(part))
        yield


class _PutBack:
    """Puts a metric back after what is done with it while `is_idle`. A copy of it, in a copy of the metric, does nothing."""

    def __init__(self, metric: Metric | None = None, in_call: Counter[int] | None = None, is_idle: Any = None) -> None:
        """`in_call` counts, by the metric's id, the calls under way that put it back at their end."""
        self._metric, self._in_call, self._is_idle = metric, in_call, is_idle
        self._lent: list[Callable[[], None]] = []

    def __reduce__(self) -> Any:
        return _PutBack, ()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        metric = self._metric
        assert metric is not None
        run = metric.update

        @wraps(run)
        def update(*args: Any, **kwargs: Any) -> None:
            self._update(run, *args, **kwargs)

        hooks = [
            metric.register_forward_pre_hook(self._before),
            metric.register_forward_hook(self._after, always_call=True),
        ]
        vars(metric)["update"] = update
        try:
            yield
        finally:
            vars(metric)["update"] = run
            for hook in hooks:
                hook.remove()

    def _update(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        metric, in_call = self._metric, self._in_call
        assert metric is not None and in_call is not None
        is_of_this_rank = in_call[id(metric)] and not metric._to_sync  # the value of this batch alone
        if is_of_this_rank or not self._is_idle():
            run(*args, **kwargs)
            return
        give_back = _lend(metric)
        try:
            run(*args, **kwargs)
        finally:
            count = metric._update_count
            give_back()
            if in_call[id(metric)]:
                metric._update_count = count  # else `compute` warns

    def _before(self, *_: Any) -> None:
        metric, in_call = self._metric, self._in_call
        if metric is None or in_call is None or not self._is_idle():
            return
        self._lent.append(_lend(metric))
        in_call.update(id(part) for part in metric.modules())

    def _after(self, *_: Any) -> None:
        metric, in_call = self._metric, self._in_call
        if metric is None or in_call is None or not self._lent:
            return
        in_call.subtract(id(part) for part in metric.modules())
        value = metric._forward_cache
        self._lent.pop()()
        if metric.dist_sync_on_step:
            metric._forward_cache = value  # that of the active ranks


def _lend(metric: Metric) -> Callable[[], None]:
    """Puts copies in the place of what the metric, and those in it, hold. Returns what puts the originals back; whether a value
    is cached stays, as the next `compute` is a collective where none is."""
    held = [(part, dict(vars(part))) for part in metric.modules() if isinstance(part, Metric)]
    for part, attributes in held:
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                vars(part)[name] = value.clone()
            elif isinstance(value, _CONTAINERS) and name not in OF_ANY_MODULE:
                vars(part)[name] = copy(value)

    def give_back() -> None:
        for part, attributes in held:
            now = vars(part)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update({name: value for name, value in attributes.items() if name != "_computed"})

    return give_back


@contextmanager
def _without_groups(metrics: MetricCollection) -> Iterator[None]:
    """Metrics that have counted nothing look alike and would be taken for one."""
    enabled, metrics._enable_compute_groups = metrics._enable_compute_groups, False
    try:
        yield
    finally:
        metrics._enable_compute_groups = enabled
