"""Instruction files of the usual formats, and what is said of those that cannot be read."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from odb_lightning.data import KNOWN_FORMATS, read_sft

DATA = os.environ.get("ODB_TEST_DATA")
RECORDS = {
    "HumanEval.jsonl.gz": 164,
    "belle_zh_seed_tasks.jsonl": 175,
    "fastchat_dummy_conversation.json": 500,
    "gsm8k_train_first4000.jsonl": 4000,
    "lf_alpaca_en_demo.json": 999,
    "lf_alpaca_zh_demo.json": 1000,
    "lf_dpo_en_demo.json": 300,
    "lf_glaive_toolcall_en_demo.json": 300,
    "lf_kto_en_demo.json": 300,
    "lf_v1_sft_demo.jsonl": 500,
    "mbpp.jsonl": 974,
    "selfinstruct_user_oriented.jsonl": 252,
    "t0_mix_sample.jsonl": 3000,
    "tau_airline_few_shot.jsonl": 19,
    "tau_retail_few_shot.jsonl": 69,
}


def turns(*pairs: str) -> list[dict[str, str]]:
    return [dict(zip(("role", "content"), pair.split(": ", 1), strict=True)) for pair in pairs]


def read(tmp_path: Path, *records: dict, name: str = "data.jsonl") -> list:
    file = tmp_path / name
    file.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records), encoding="utf-8", newline="")
    return read_sft(file)


CASES = {
    "alpaca": (
        {"instruction": "Do", "input": "this", "output": "done", "system": "Sys", "history": [["a", "b"]]},
        turns("system: Sys", "user: a", "assistant: b", "user: Do\n\nthis", "assistant: done"),
    ),
    "alpaca without input": ({"instruction": "Do", "input": "", "output": "ok"}, turns("user: Do", "assistant: ok")),
    "dolly": ({"instruction": "Do", "context": "c", "response": "r"}, turns("user: Do\n\nc", "assistant: r")),
    "prompt": ({"prompt": "p", "completion": "c<|endoftext|>", "template": "t"}, turns("user: p", "assistant: c")),
    "question": ({"question": "q", "answer": "a"}, turns("user: q", "assistant: a")),
    "mbpp": ({"text": "t", "code": "c", "test_list": []}, turns("user: t", "assistant: c")),
    "humaneval": ({"prompt": "p", "canonical_solution": "s", "test": ""}, turns("user: p", "assistant: s")),
    "self-instruct": (
        {"instruction": "i", "instances": [{"input": "x", "output": "y"}]},
        turns("user: i\n\nx", "assistant: y"),
    ),
    "sharegpt": (
        {
            "conversations": [
                {"from": "system", "value": "Sys"},
                {"from": "human", "value": "h"},
                {"from": "function_call", "value": "{}"},
                {"from": "observation", "value": "o"},
                {"from": "gpt", "value": "g"},
            ],
            "tools": "[]",
        },
        turns(
            "system: Sys\n\n# Tools\n\n[]",
            "user: h",
            "assistant: <tool_call>\n{}\n</tool_call>",
            "tool: o",
            "assistant: g",
        ),
    ),
    "messages": ({"messages": turns("user: u", "assistant: a"), "label": True}, turns("user: u", "assistant: a")),
    "parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "u"}, {"type": "text", "text": "v"}]},
                {"role": "assistant", "content": [{"type": "text", "value": "a"}], "loss_weight": 0.0},
            ]
        },
        [{"role": "user", "content": "uv"}, {"role": "assistant", "content": "a", "loss": False}],
    ),
    "tool calls": (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
        turns('assistant: <tool_call>\n{"name": "f"}\n</tool_call>'),
    ),
    "preference": (
        {
            "conversations": [{"from": "human", "value": "h"}],
            "chosen": {"from": "gpt", "value": "c"},
            "rejected": {"from": "gpt", "value": "r"},
        },
        turns("user: h", "assistant: c"),
    ),
    "preference with the prompt repeated": (
        {"prompt": "p", "chosen": turns("user: p", "assistant: c"), "rejected": []},
        turns("user: p", "assistant: c"),
    ),
    "mt-bench": ({"turns": ["q", "r"], "reference": ["a", "b"]}, turns("user: q", "assistant: a", "user: r", "assistant: b")),
    "transcript": (
        {"messages_display": "user: hi\nassistant: None\ntool: {}\nassistant: a\n\nb: c\nuser: bye"},
        turns("user: hi", "tool: {}", "assistant: a\n\nb: c", "user: bye"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_format(tmp_path, case):
    record, expected = CASES[case]
    if case != "transcript":
        assert read(tmp_path, record) == [expected]
    else:
        assert read(tmp_path, record)[0] == expected


def test_several_instances_give_a_conversation_each(tmp_path):
    record = {"instruction": "i", "instances": [{"input": "", "output": "1"}, {"input": "x", "output": "2"}]}
    assert read(tmp_path, record) == [turns("user: i", "assistant: 1"), turns("user: i\n\nx", "assistant: 2")]


def test_json_lines_are_split_on_newlines_only_and_blank_lines_skipped(tmp_path):
    record = {"question": "a\u2028b\x85c", "answer": "d"}
    file = tmp_path / "data.jsonl"
    file.write_bytes(("\ufeff" + json.dumps(record, ensure_ascii=False) + "\r\n\n").encode() * 1)
    assert read_sft(file) == [turns("user: a\u2028b\x85c", "assistant: d")]


def test_an_array_and_a_gzipped_file_read_like_lines(tmp_path):
    records = [{"question": str(i), "answer": "a"} for i in range(3)]
    lines = read(tmp_path, *records)
    (tmp_path / "data.json").write_text(json.dumps(records, indent=2))
    (tmp_path / "data.gz").write_bytes(gzip.compress(json.dumps(records).encode()))
    assert lines == read_sft(tmp_path / "data.json") == read_sft(tmp_path / "data.gz")


def test_an_unknown_format_names_file_line_keys_and_what_is_known(tmp_path):
    with pytest.raises(ValueError) as error:
        read(tmp_path, {"question": "q", "answer": "a"}, {"foo": 1, "bar": 2})
    for part in ("data.jsonl, line 2", "['bar', 'foo']", *KNOWN_FORMATS):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"[]", "holds no records"),
        (b'{"question": "q", "answer": "a"}\n{"question', "line 2: not JSON"),
        (b'[{"question": "q",\n "answer" 1}]', "line 2: not JSON"),
        (b'{"question": "q", "answer": "a"}\n7', "line 2: a record is a JSON object, this is a int"),
        (b'[{"messages": [{"role": "user"}, {"role": "alien", "content": ""}]}]', "record 1: unknown speaker 'alien'"),
        (b'{"messages": 3}', "line 1: TypeError"),
        (b'{"messages_display": "nobody speaks"}', "line 1: messages_display holds no line"),
        (b"PAR1\xff\xfe", "neither UTF-8"),
        (b"\x1f\x8bbroken", "neither UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_why(tmp_path, content, message):
    file = tmp_path / "data.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_sft(file)
    assert str(file) in str(error.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.json does not exist"):
        read_sft(tmp_path / "gone.json")
    with pytest.raises(ValueError, match="not a file"):
        read_sft(tmp_path)


def test_records_without_an_answer_are_kept_and_warned_about(tmp_path):
    with pytest.warns(UserWarning, match="1 of 2 records hold no answer"):
        assert len(read(tmp_path, {"turns": ["q"]}, {"question": "q", "answer": "a"})) == 2


@pytest.mark.skipif(DATA is None, reason="ODB_TEST_DATA names no folder of instruction files")
@pytest.mark.parametrize("name", RECORDS)
def test_public_file(name):
    assert DATA is not None
    conversations = read_sft(Path(DATA) / name)
    assert len(conversations) == RECORDS[name]
    for conversation in conversations:
        assert {turn["role"] for turn in conversation} <= {"system", "user", "assistant", "tool"}
        assert any(turn["role"] == "assistant" and turn.get("loss", True) for turn in conversation)


@pytest.mark.skipif(DATA is None, reason="ODB_TEST_DATA names no folder of instruction files")
def test_public_questions_without_answers():
    assert DATA is not None
    with pytest.warns(UserWarning, match="41 of 80"):
        assert len(read_sft(Path(DATA) / "mt_bench_question.jsonl")) == 80
