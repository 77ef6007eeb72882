"""Conversations to ids and labels, with the packaged vocabulary and with a Hugging Face chat template."""

from __future__ import annotations

import pickle

import pytest
import torch

from odb_lightning.data import ChatDataset, encode_chat, load_chat_tokenizer, sft_chat_datasets, stdlib_chat_datasets
from odb_lightning.data.datasets import spread

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen3: an empty thought before the last answer only, so an earlier rendering is no prefix of the whole.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Yes.\n"},
    {"role": "user", "content": "Two? 你好 🙂"},
    {"role": "assistant", "content": "def f(x):\n        return x  # 2"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_chat_tokenizer()


def text(tokenizer, ids) -> str:
    return tokenizer._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def supervised(labels) -> list[int]:
    return [label for label in labels if label != -100]


def hf(tokenizer, template):
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer._tokenizer).from_str(tokenizer._tokenizer.to_str()),
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
    )
    fast.chat_template = template
    return fast


def test_the_text_is_chatml_and_only_what_the_assistant_says_is_a_target(tokenizer):
    ids, labels = encode_chat(tokenizer, TWO_TURNS, None)
    assert text(tokenizer, ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nYes.\n<|im_end|>\n"
        "<|im_start|>user\nTwo? 你好 🙂<|im_end|>\n<|im_start|>assistant\ndef f(x):\n        return x  # 2<|im_end|>"
    )
    assert text(tokenizer, supervised(labels)) == "Yes.\n<|im_end|>def f(x):\n        return x  # 2<|im_end|>"
    assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))


def test_markers_inside_a_content_stay_text(tokenizer):
    ids, _ = encode_chat(tokenizer, [{"role": "user", "content": "<|im_end|><|pad|>"}], None)
    end = tokenizer._tokenizer.token_to_id("<|im_end|>")
    assert ids.count(end) == 1 and tokenizer.pad_id not in ids


def test_cutoff_keeps_the_beginning_and_loss_false_leaves_no_target(tokenizer):
    ids, labels = encode_chat(tokenizer, TWO_TURNS, None)
    assert encode_chat(tokenizer, TWO_TURNS, 17) == (ids[:17], labels[:17])
    muted = [{**turn, "loss": False} for turn in TWO_TURNS]
    assert encode_chat(tokenizer, muted, None) == (ids, [-100] * len(ids))


def test_the_packaged_vocabulary_covers_any_text_compactly(tokenizer):
    assert tokenizer.vocab_size == 8192
    prose = "The number of samples in a batch depends on the length of each of the samples."
    assert len(tokenizer._tokenizer.encode(prose).ids) < len(prose) / 3
    for sample in ("\x00\r\n\t\u2028 ñ 你好 🙂", "if x:\n            return None"):
        assert text(tokenizer, tokenizer._tokenizer.encode(sample).ids) == sample


def test_a_hugging_face_template_gives_the_same_as_the_packaged_one(tokenizer):
    adapted = load_chat_tokenizer(hf(tokenizer, CHATML))
    conversation = [{**turn, "content": turn["content"].strip()} for turn in TWO_TURNS]
    ids, labels = encode_chat(tokenizer, conversation, None)
    hf_ids, hf_labels = encode_chat(adapted, conversation, None)
    assert text(tokenizer, hf_ids) == text(tokenizer, ids) + "\n"
    assert supervised(hf_labels) == supervised(labels)
    assert adapted.pad_id == tokenizer.pad_id and adapted.vocab_size == tokenizer.vocab_size


def test_a_template_that_renders_earlier_turns_differently_still_gives_every_answer(tokenizer):
    _, labels = encode_chat(load_chat_tokenizer(hf(tokenizer, THINKING)), TWO_TURNS, None)
    assert text(tokenizer, supervised(labels)) == (
        "Yes.\n<|im_end|><think>\n\n</think>\n\ndef f(x):\n        return x  # 2<|im_end|>"
    )


def test_a_saved_tokenizer_is_loaded_by_its_folder_and_one_without_template_is_refused(tokenizer, tmp_path):
    hf(tokenizer, CHATML).save_pretrained(tmp_path)
    assert encode_chat(load_chat_tokenizer(tmp_path), TWO_TURNS, 5)[0] == encode_chat(tokenizer, TWO_TURNS, 5)[0]
    with pytest.raises(ValueError, match="no chat template"):
        load_chat_tokenizer(hf(tokenizer, None))
    with pytest.raises(ValueError, match="rewrites"):
        encode_chat(load_chat_tokenizer(hf(tokenizer, "{{ messages | length }}")), TWO_TURNS, None)


def test_a_dataset_gives_int64_and_travels_to_another_process():
    dataset = ChatDataset([TWO_TURNS] * 3, cutoff=20)
    item = dataset[1]
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert item["input_ids"].shape == item["labels"].shape == (20,)
    payload = pickle.dumps(dataset)
    assert len(payload) < 10_000  # the vocabulary does not travel
    assert torch.equal(pickle.loads(payload)[1]["input_ids"], item["input_ids"])


def test_the_same_text_gives_a_dataset_whatever_the_kind_of_tokenizer(tokenizer):
    plain, adapted = (ChatDataset([TWO_TURNS], tokenizer=own) for own in (tokenizer._tokenizer, hf(tokenizer, CHATML)))
    assert torch.equal(pickle.loads(pickle.dumps(plain))[0]["labels"], ChatDataset([TWO_TURNS])[0]["labels"])
    assert len(pickle.loads(pickle.dumps(adapted))[0]["labels"]) == len(adapted[0]["labels"])


def test_limits_spread_over_the_data():
    assert spread(range(10), 4) == [0, 2, 5, 7]
    assert spread(range(3), None) == spread(range(3), 5) == [0, 1, 2]
    with pytest.raises(ValueError, match="limit of 0"):
        spread(range(3), 0)


def test_stdlib_datasets_have_targets_at_the_default_cutoff():
    train, validation = stdlib_chat_datasets(limit=60, val_limit=7)
    assert (len(train), len(validation)) == (60, 7)
    assert all((item["labels"][1:] != -100).any() for item in (train[i] for i in range(60)))


def test_held_out_records_are_disjoint_and_follow_the_seed(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(f'{{"question": "{i}?", "answer": "{i}"}}' for i in range(40)))
    train, validation = sft_chat_datasets(file, val_fraction=0.1, seed=3)
    asked = [{turns[0]["content"] for turns in part.conversations} for part in (train, validation)]
    assert len(asked[1]) == 4 and not asked[0] & asked[1] and len(asked[0] | asked[1]) == 40
    assert sft_chat_datasets(file, val_fraction=0.1, seed=3)[1].conversations == validation.conversations
    assert sft_chat_datasets(file, val_fraction=0.1, seed=4)[1].conversations != validation.conversations
    assert sft_chat_datasets(file, val_fraction=0)[1] is None
    assert len(sft_chat_datasets(file, val_path=file, val_limit=5)[1]) == 5
