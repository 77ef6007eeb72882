"""Conversations as a torch data set whose lengths are known only once a sample has been tokenised."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from odb_lightning.data.chat import ChatTokenizer, Conversation, encode_chat, load_chat_tokenizer
from odb_lightning.data.sft import read_sft
from odb_lightning.data.stdlib import StdlibSample, read_stdlib, split_by_file

DEFAULT_CUTOFF = 2048
_Item = TypeVar("_Item")


class ChatDataset(Dataset[dict[str, Tensor]]):
    """Item i is `{"input_ids", "labels"}`, one-dimensional int64 of equal length <= `cutoff` (None: whole).

    Tokenises in `__getitem__`. `tokenizer` is what `load_chat_tokenizer` takes; each process loads its own, so the data set
    travels to spawned workers. A prompt of `cutoff` tokens or more leaves a sample without targets: it stays in the data
    (nothing is lost without notice) and adds nothing to the loss.
    """

    def __init__(
        self, conversations: Sequence[Conversation], *, cutoff: int | None = DEFAULT_CUTOFF, tokenizer: Any = None
    ) -> None:
        if cutoff is not None and cutoff < 2:
            raise ValueError(f"cutoff is {cutoff}: at least 2 tokens are needed for one target")
        self.conversations = conversations
        self.cutoff = cutoff
        self.tokenizer = tokenizer

    @cached_property
    def chat_tokenizer(self) -> ChatTokenizer:
        return load_chat_tokenizer(self.tokenizer)

    @property
    def pad_id(self) -> int:
        """For `PadCollator`."""
        return self.chat_tokenizer.pad_id

    @property
    def vocab_size(self) -> int:
        """For the model's embedding."""
        return self.chat_tokenizer.vocab_size

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        input_ids, labels = encode_chat(self.chat_tokenizer, self.conversations[index], self.cutoff)
        return {"input_ids": torch.tensor(input_ids), "labels": torch.tensor(labels)}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "chat_tokenizer"}


def stdlib_chat_datasets(
    *,
    cutoff: int | None = DEFAULT_CUTOFF,
    limit: int | None = None,
    val_limit: int | None = None,
    tokenizer: Any = None,
) -> tuple[ChatDataset, ChatDataset]:
    """Training and validation data from the Python standard library: the prompt is signature and docstring, the answer is
    the source. Split by file; a limit takes samples evenly spread over the files."""
    train, validation = _stdlib_split()
    return (
        ChatDataset(_chats(spread(train, limit)), cutoff=cutoff, tokenizer=tokenizer),
        ChatDataset(_chats(spread(validation, val_limit)), cutoff=cutoff, tokenizer=tokenizer),
    )


def sft_chat_datasets(
    path: str | os.PathLike[str],
    *,
    val_path: str | os.PathLike[str] | None = None,
    val_fraction: float = 0.05,
    cutoff: int | None = DEFAULT_CUTOFF,
    limit: int | None = None,
    val_limit: int | None = None,
    tokenizer: Any = None,
    seed: int = 0,
) -> tuple[ChatDataset, ChatDataset | None]:
    """Training and validation data from an instruction file (`read_sft`). Without `val_path`, `val_fraction` of the records,
    at least one and drawn by `seed`, are held out; the validation data is None where the fraction is 0 or the file has
    one record only. A limit takes records evenly spread over the file."""
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}: give a share from 0 to below 1")
    train = read_sft(path)
    validation: list[Conversation] = []
    if val_path is not None:
        validation = read_sft(val_path)
    elif val_fraction > 0 and len(train) > 1:
        count = min(max(1, round(val_fraction * len(train))), len(train) - 1)
        held_out = set(random.Random(seed).sample(range(len(train)), count))
        validation = [turns for index, turns in enumerate(train) if index in held_out]
        train = [turns for index, turns in enumerate(train) if index not in held_out]
    validation = spread(validation, val_limit)
    return (
        ChatDataset(spread(train, limit), cutoff=cutoff, tokenizer=tokenizer),
        ChatDataset(validation, cutoff=cutoff, tokenizer=tokenizer) if validation else None,
    )


def spread(items: Sequence[_Item], limit: int | None) -> list[_Item]:
    """At most `limit` items at even distances, in order: the same for every seed, and with the lengths of the whole."""
    if limit is None or limit >= len(items):
        return list(items)
    if limit < 1:
        raise ValueError(f"a limit of {limit} leaves no data: give at least 1, or null for all")
    return [items[index * len(items) // limit] for index in range(limit)]


@cache
def _stdlib_split() -> tuple[list[StdlibSample], list[StdlibSample]]:
    return split_by_file(read_stdlib())


def _chats(samples: Sequence[StdlibSample]) -> list[Conversation]:
    return [[{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.answer}] for sample in samples]
