"""Conversations as training data: the Python standard library, or an instruction file."""

from odb_lightning.data.chat import ChatTokenizer, Conversation, Message, encode_chat, load_chat_tokenizer
from odb_lightning.data.collate import PadCollator
from odb_lightning.data.datasets import ChatDataset, sft_chat_datasets, stdlib_chat_datasets
from odb_lightning.data.sft import KNOWN_FORMATS, read_sft
from odb_lightning.data.stdlib import StdlibSample, read_stdlib, split_by_file

__all__ = [
    "KNOWN_FORMATS",
    "ChatDataset",
    "ChatTokenizer",
    "Conversation",
    "Message",
    "PadCollator",
    "StdlibSample",
    "encode_chat",
    "load_chat_tokenizer",
    "read_sft",
    "read_stdlib",
    "sft_chat_datasets",
    "split_by_file",
    "stdlib_chat_datasets",
]
