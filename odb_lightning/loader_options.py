"""What the options of a loader may be, and what they are by default."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import Any


def length_of_input_ids(sample: Any) -> int:
    """The number of tokens in `sample["input_ids"]` (or `sample.input_ids`): the default `length_fn`.

    Raises TypeError where there are none.
    """
    try:
        ids = sample["input_ids"] if isinstance(sample, Mapping) else sample.input_ids
    except (KeyError, AttributeError):
        held = f"keys {sorted(map(str, sample))}" if isinstance(sample, Mapping) else "no attribute 'input_ids'"
        raise TypeError(
            f"the length of a sample of type {type(sample).__name__} with {held} is not known: "
            "pass length_fn=<function of a sample>"
        ) from None
    shape = getattr(ids, "shape", None)
    return int(shape[-1]) if shape else len(ids)


def start_method_of(context: Any) -> str | None:
    """The name of a start method, given a name or a context; None is the interpreter's default. Raises ValueError."""
    if context is None:
        return None
    if isinstance(context, str):
        if context not in multiprocessing.get_all_start_methods():
            raise ValueError(
                f"multiprocessing_context={context!r} is unknown: choose one of {multiprocessing.get_all_start_methods()}"
            )
        return context
    method: str = context.get_start_method()
    return method


def check_at_least_one(**values: int | None) -> None:
    """Raises ValueError for an option that is no whole number of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError for an option that is none of its choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: choose {' or '.join(map(repr, choices))}")
