"""Conversations to token ids and labels: the ChatML template of the packaged vocabulary, or a Hugging Face chat template."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from typing import Any, Protocol, TypedDict

from odb_lightning.runtime.counting import IGNORE_INDEX

IM_START, IM_END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
HF_MEND = "install the extra: pip install 'odb-lightning[hf]'"


class _Role(TypedDict):
    role: str
    content: str


class Message(_Role, total=False):
    """One turn. Roles: system, user, assistant, tool."""

    loss: bool
    """False leaves an assistant's turn without targets."""


Conversation = list[Message]


class ChatTokenizer(Protocol):
    """What `ChatDataset` asks of a vocabulary with its template."""

    @property
    def pad_id(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def segments(self, conversation: Sequence[Message]) -> list[tuple[list[int], bool]]:
        """Token ids in order, each piece with whether it is supervised."""
        ...


def encode_chat(tokenizer: ChatTokenizer, conversation: Sequence[Message], cutoff: int | None) -> tuple[list[int], list[int]]:
    """`input_ids` and `labels` of equal length, at most `cutoff`. Labels are the ids where an assistant speaks (its end
    marker included) and -100 elsewhere. What lies behind `cutoff` is cut off: a prompt that is longer leaves no target."""
    input_ids: list[int] = []
    labels: list[int] = []
    for ids, supervised in tokenizer.segments(conversation):
        input_ids += ids
        labels += ids if supervised else [IGNORE_INDEX] * len(ids)
        if cutoff is not None and len(input_ids) >= cutoff:
            break
    return input_ids[:cutoff], labels[:cutoff]


def load_chat_tokenizer(tokenizer: Any = None) -> ChatTokenizer:
    """The vocabulary for `tokenizer`: None is the packaged one; a path ending in `.json` is a `tokenizers` file with the
    ChatML markers; any other string goes to `transformers.AutoTokenizer`; objects of both libraries are taken as they are."""
    if tokenizer is None:
        text = resources.files("odb_lightning.data").joinpath("tokenizer.json").read_text(encoding="utf-8")
        return ChatMLTokenizer(_tokenizers().Tokenizer.from_str(text))
    if isinstance(tokenizer, (str, os.PathLike)):
        if str(tokenizer).endswith(".json"):
            return ChatMLTokenizer(_tokenizers().Tokenizer.from_file(str(tokenizer)))
        return HFChatTokenizer(_transformers().AutoTokenizer.from_pretrained(str(tokenizer)))
    if hasattr(tokenizer, "segments"):
        return tokenizer  # type: ignore[no-any-return]
    return HFChatTokenizer(tokenizer) if hasattr(tokenizer, "apply_chat_template") else ChatMLTokenizer(tokenizer)


class ChatMLTokenizer:
    """ChatML over a `tokenizers.Tokenizer`: `<|im_start|>role\\ncontent<|im_end|>\\n` per turn. Markers that occur inside a
    content are plain text, never tokens of the template."""

    def __init__(self, tokenizer: Any) -> None:
        markers = {marker: tokenizer.token_to_id(marker) for marker in (IM_START, IM_END, PAD)}
        missing = [marker for marker, token_id in markers.items() if token_id is None]
        if missing:
            raise ValueError(f"the vocabulary lacks {', '.join(missing)}: add them as special tokens before training on chats")
        self._tokenizer = _tokenizers().Tokenizer.from_str(tokenizer.to_str())  # a copy: the next line changes it
        self._tokenizer.encode_special_tokens = True
        self._end = markers[IM_END]
        self._start = markers[IM_START]
        self._newline = self._encode("\n")
        self._heads: dict[str, list[int]] = {}
        self.pad_id: int = markers[PAD]
        self.vocab_size: int = tokenizer.get_vocab_size()

    def segments(self, conversation: Sequence[Message]) -> list[tuple[list[int], bool]]:
        pieces = []
        for message in conversation:
            pieces.append((self._head(message["role"]), False))
            pieces.append(([*self._encode(message["content"]), self._end], _is_supervised(message)))
            pieces.append((self._newline, False))
        return pieces[:-1]

    def _head(self, role: str) -> list[int]:
        if role not in self._heads:
            self._heads[role] = [self._start, *self._encode(role + "\n")]
        return self._heads[role]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]


class HFChatTokenizer:
    """The chat template of a Hugging Face tokenizer. The supervised parts are found in the rendered text, which is then
    encoded in pieces, cut where generation would begin; so it needs no `{% generation %}` marks in the template."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("this tokenizer has no chat template: set tokenizer.chat_template, or take an instruct model's")
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        if pad_id is None:
            raise ValueError("this tokenizer has neither a padding nor an end token: set tokenizer.pad_token")
        self._tokenizer = tokenizer
        self.pad_id: int = pad_id
        self.vocab_size: int = len(tokenizer)

    def segments(self, conversation: Sequence[Message]) -> list[tuple[list[int], bool]]:
        text = self._render(conversation)
        pieces, cursor = [], 0
        for position, message in enumerate(conversation):
            if _is_supervised(message):
                start, end = self._span(text, cursor, conversation, position)
                pieces += [(text[cursor:start], False), (text[start:end], True)]
                cursor = end
        pieces.append((text[cursor:], False))
        return [(self._tokenizer.encode(piece, add_special_tokens=False), supervised) for piece, supervised in pieces if piece]

    def _span(self, text: str, cursor: int, conversation: Sequence[Message], position: int) -> tuple[int, int]:
        """Where the turn at `position` begins and ends in `text`, with its end token. The rendering of the turns before it
        can differ from `text` (templates drop the reasoning of earlier turns), so the content is searched for."""
        before = self._render(conversation[:position], add_generation_prompt=True)
        start = len(before) if text.startswith(before) else cursor
        content = conversation[position]["content"].strip()
        found = text.find(content, start)
        if found < 0:
            raise ValueError(
                f"the chat template rewrites the assistant's text, so its targets cannot be found: {content[:80]!r}. "
                "Set a chat_template that writes contents as they are."
            )
        end = found + len(content)
        end_token = self._tokenizer.eos_token or ""
        rest = text[end:].lstrip()
        if end_token and rest.startswith(end_token):
            end = len(text) - len(rest) + len(end_token)
        return (start if text.startswith(before) else found), end

    def _render(self, conversation: Sequence[Message], add_generation_prompt: bool = False) -> str:
        if not conversation:
            return ""
        turns = [{"role": message["role"], "content": message["content"]} for message in conversation]
        return self._tokenizer.apply_chat_template(  # type: ignore[no-any-return]
            turns, tokenize=False, add_generation_prompt=add_generation_prompt
        )


def _is_supervised(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("loss", True)


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(f"the packaged data sets need the `tokenizers` library; {HF_MEND}") from error
    return tokenizers


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"a Hugging Face tokenizer needs the `transformers` library; {HF_MEND}") from error
    return transformers
