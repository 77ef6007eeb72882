"""An instruction file of any usual format to conversations."""

from __future__ import annotations

import gzip
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from odb_lightning.data.chat import Conversation, Message

_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation", "function", "ipython"), "tool"),
    "function_call": "assistant",
}
_TRANSCRIPT_TURN = re.compile(r"^(user|assistant|tool|system): ", re.MULTILINE)
_END_MARKER = "<|endoftext|>"


def read_sft(path: str | os.PathLike[str]) -> list[Conversation]:
    """The conversations of a JSON, JSON Lines or gzipped file, in its order. The format is told from the keys of each record
    (`KNOWN_FORMATS`). One record gives one conversation, except that each of several `instances` gives one.

    Of preferences the chosen answer is taken; the `label` of a KTO record is not looked at. Records without an assistant's
    turn are kept (they have no target) and warned about. `ValueError` names the file and the line or record at fault.
    """
    file = Path(path)
    conversations: list[Conversation] = []
    for place, record in _records(file):
        try:
            conversations += _convert(record)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
            raise ValueError(f"{file}, {place}: {reason}") from error
    if not conversations:
        raise ValueError(f"{file} holds no records: an instruction file has at least one")
    unanswered = sum(all(message["role"] != "assistant" for message in turns) for turns in conversations)
    if unanswered:
        warnings.warn(f"{file}: {unanswered} of {len(conversations)} records hold no answer to train on", stacklevel=2)
    return conversations


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """Each record with the place to name when it is at fault."""
    text = _read_text(file)
    if text.lstrip().startswith("["):
        try:
            records = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {error.lineno}: not JSON ({error.msg}, column {error.colno})") from error
        for number, record in enumerate(records, 1):
            yield f"record {number}", record
        return
    # not splitlines: JSON strings may hold other line separators
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{file}, line {number}: not JSON ({error.msg}, column {error.colno}). "
                "The file is read as JSON Lines, a record a line; a JSON file begins with '['."
            ) from error


def _read_text(file: Path) -> str:
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: give the path of a JSON, JSON Lines or .gz instruction file")
    if not file.is_file():
        raise ValueError(f"{file} is not a file: give the path of one JSON, JSON Lines or .gz instruction file")
    content = file.read_bytes()
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is neither UTF-8 text nor gzipped UTF-8 text ({error}): convert it to JSON Lines") from error
    if not text.strip():
        raise ValueError(f"{file} is empty: an instruction file holds at least one record")
    return text


def _convert(record: Any) -> list[Conversation]:
    if not isinstance(record, dict):
        raise ValueError(f"a record is a JSON object, this is a {type(record).__name__}")
    for known in _FORMATS:
        if all(key in record for key in known.keys):
            return known.convert(record)
    raise ValueError(f"unknown format with the keys {sorted(record)}. Known formats: {'; '.join(KNOWN_FORMATS)}")


def _from_turns(key: str) -> Callable[[dict[str, Any]], list[Conversation]]:
    def convert(record: dict[str, Any]) -> list[Conversation]:
        conversation = [_message(turn) for turn in record[key]]
        if "chosen" in record:
            conversation += _chosen(record["chosen"])
        return [_with_system(conversation, record)]

    return convert


def _from_pair(
    prompt: str, answer: str, context: tuple[str, ...] = ("input", "context")
) -> Callable[[dict[str, Any]], list[Conversation]]:
    def convert(record: dict[str, Any]) -> list[Conversation]:
        conversation: Conversation = []
        for earlier in record.get("history") or []:
            conversation += [_turn("user", earlier[0]), _turn("assistant", earlier[1])]
        parts = [record[prompt], *(record[key] for key in context if record.get(key))]
        conversation += [_turn("user", "\n\n".join(_text(part) for part in parts)), _turn("assistant", record[answer])]
        return [_with_system(conversation, record)]

    return convert


def _from_instances(record: dict[str, Any]) -> list[Conversation]:
    convert = _from_pair("instruction", "output")
    return [convert({**instance, "instruction": record["instruction"]})[0] for instance in record["instances"]]


def _from_preference(record: dict[str, Any]) -> list[Conversation]:
    prompt, chosen = record["prompt"], _chosen(record["chosen"])
    turns = [_message(turn) for turn in prompt] if isinstance(prompt, list) else [_turn("user", prompt)]
    whole = chosen if chosen[: len(turns)] == turns else turns + chosen  # some sets repeat the prompt in `chosen`
    return [_with_system(whole, record)]


def _from_questions(record: dict[str, Any]) -> list[Conversation]:
    """MT-bench: `turns` are the user's; `reference` holds the answers, where there are any."""
    if all(isinstance(turn, dict) for turn in record["turns"]):
        return [[_message(turn) for turn in record["turns"]]]
    conversation: Conversation = []
    answers = record.get("reference") or []
    for position, question in enumerate(record["turns"]):
        conversation.append(_turn("user", question))
        conversation += [_turn("assistant", answer) for answer in answers[position : position + 1]]
    return [conversation]


def _from_transcript(record: dict[str, Any]) -> list[Conversation]:
    """Flat text with `user: ` and so on at the beginning of a turn. A turn "None" stands for a call that is not shown."""
    pieces = _TRANSCRIPT_TURN.split(record["messages_display"])
    turns = [_turn(role, content.strip()) for role, content in zip(pieces[1::2], pieces[2::2], strict=True)]
    if not turns:
        raise ValueError("messages_display holds no line that begins with 'user: ' or 'assistant: '")
    return [[turn for turn in turns if turn["content"] != "None"]]


def _with_system(conversation: Conversation, record: dict[str, Any]) -> Conversation:
    parts = [record["system"]] if record.get("system") else []
    if record.get("tools"):
        parts.append("# Tools\n\n" + _text(record["tools"]))
    if parts and conversation and conversation[0]["role"] == "system":
        parts.insert(0, conversation[0]["content"])
        conversation = conversation[1:]
    return [_turn("system", "\n\n".join(parts)), *conversation] if parts else conversation


def _chosen(chosen: Any) -> Conversation:
    if isinstance(chosen, str):
        return [_turn("assistant", chosen)]
    return [_message(turn) for turn in (chosen if isinstance(chosen, list) else [chosen])]


def _message(turn: dict[str, Any]) -> Message:
    speaker = turn["role"] if "role" in turn else turn["from"]
    if speaker not in _ROLES:
        raise ValueError(f"unknown speaker {speaker!r}: known are {', '.join(_ROLES)}")
    content = _text(turn["content"] if "content" in turn else turn.get("value"))
    calls = [content] if speaker == "function_call" else [_text(call) for call in turn.get("tool_calls") or []]
    if calls:
        spoken = "" if speaker == "function_call" else content
        content = spoken + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    message = _turn(_ROLES[speaker], content)
    if message["role"] == "assistant" and turn.get("loss_weight", 1) == 0:
        message["loss"] = False
    return message


def _turn(role: str, content: Any) -> Message:
    return {"role": role, "content": _text(content).removesuffix(_END_MARKER)}


def _text(content: Any) -> str:
    """Plain text of a content: a string, parts of {type, text} or {type, value}, nothing, or data (as JSON)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(isinstance(part, dict) and "type" in part for part in content):
        return "".join(_text(part.get("text", part.get("value"))) for part in content)
    return json.dumps(content, ensure_ascii=False)


class _Format(NamedTuple):
    keys: tuple[str, ...]
    convert: Callable[[dict[str, Any]], list[Conversation]]


_FORMATS = (
    _Format(("messages",), _from_turns("messages")),
    _Format(("conversations",), _from_turns("conversations")),
    _Format(("conversation",), _from_turns("conversation")),
    _Format(("messages_display",), _from_transcript),
    _Format(("prompt", "chosen"), _from_preference),
    _Format(("instruction", "instances"), _from_instances),
    _Format(("instruction", "output"), _from_pair("instruction", "output")),
    _Format(("instruction", "response"), _from_pair("instruction", "response")),
    _Format(("prompt", "completion"), _from_pair("prompt", "completion")),
    _Format(("prompt", "canonical_solution"), _from_pair("prompt", "canonical_solution")),
    _Format(("prompt", "response"), _from_pair("prompt", "response")),
    _Format(("question", "answer"), _from_pair("question", "answer")),
    _Format(("text", "code"), _from_pair("text", "code")),
    _Format(("turns",), _from_questions),
)
KNOWN_FORMATS = tuple(" + ".join(known.keys) for known in _FORMATS)
"""The keys that tell a format, in the order in which they are tried."""
