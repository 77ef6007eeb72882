"""`python -m odb_lightning.data.make_tokenizer OUT` writes the byte-level BPE vocabulary that is packaged as tokenizer.json."""

from __future__ import annotations

import ast
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from odb_lightning.data.chat import IM_END, IM_START, PAD
from odb_lightning.data.stdlib import read_stdlib

VOCAB_SIZE = 8192
# The split of Qwen and GPT-4: one word with the blank before it, single digits, runs of blanks of their own (code).
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PROSE_WEIGHT = 8
"""How often the prose counts: code would else take nearly all merges, and files of English instructions suffer."""


def train_tokenizer() -> Any:
    """A `tokenizers.Tokenizer` of `VOCAB_SIZE` entries, trained on this interpreter's standard library."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _texts() -> Iterator[str]:
    for sample in read_stdlib():
        yield sample.answer
        prose = _docstring(sample.answer)
        for _ in range(_PROSE_WEIGHT):
            yield prose
    for topic in _language_reference():
        for _ in range(_PROSE_WEIGHT):
            yield topic


def _docstring(source: str) -> str:
    node = ast.parse(source).body[0]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    return ast.get_docstring(node) or ""


def _language_reference() -> list[str]:
    """The texts of `help("topics")`: the largest piece of plain English in the standard library."""
    file = Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py")
    namespace: dict[str, Any] = {}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), namespace)
    return [textwrap.dedent(text) for text in namespace["topics"].values()]


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        raise SystemExit("usage: python -m odb_lightning.data.make_tokenizer OUT")
    Path(arguments[0]).write_text(train_tokenizer().to_str(pretty=False), encoding="utf-8")


if __name__ == "__main__":
    main()
