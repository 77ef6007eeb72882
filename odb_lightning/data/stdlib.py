"""The Python standard library as an instruction data set: no network, no download, real text with long-tailed lengths."""

from __future__ import annotations

import ast
import gc
import hashlib
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"}
)
_VALIDATION_SHARE = 0.05
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class StdlibSample(NamedTuple):
    """A function, method or class that has a docstring."""

    file: str
    """Path relative to the standard library, with "/"."""
    prompt: str
    """Decorators, signature and docstring."""
    answer: str
    """The whole source, without the indentation of the place where it stood."""


def read_stdlib(root: str | os.PathLike[str] | None = None) -> list[StdlibSample]:
    """Every function and class (methods, async and nested ones too) with a docstring below `root`, in the order of
    files and lines, each text once: 7,186 samples on CPython 3.11.7. Folders of tests and demos are left out.

    `root` is this interpreter's standard library by default. `FileNotFoundError` where it ships no sources.
    """
    folder = Path(root if root is not None else sysconfig.get_path("stdlib"))
    seen: set[tuple[str, str]] = set()
    samples = []
    with _quiet_and_fast():
        for file in _source_files(folder):
            for sample in _read_file(folder, file):
                if (sample.prompt, sample.answer) not in seen:
                    seen.add((sample.prompt, sample.answer))
                    samples.append(sample)
    if not samples:
        raise FileNotFoundError(
            f"no Python sources with docstrings in {folder}: this interpreter ({sys.executable}) ships its standard library "
            "zipped, stripped or compiled only. Use an interpreter that ships it (python.org, pyenv, conda, uv, or your "
            "distribution's full package), or train on a file of your own: data=sft data.path=FILE"
        )
    return samples


def split_by_file(samples: Iterable[StdlibSample]) -> tuple[list[StdlibSample], list[StdlibSample]]:
    """Training and validation samples. A file goes whole to one side, chosen by a hash of its path alone, so that the
    split is the same on every machine and for every limit; about 5% of the files are for validation."""
    train: list[StdlibSample] = []
    validation: list[StdlibSample] = []
    for sample in samples:
        (validation if is_validation_file(sample.file) else train).append(sample)
    return train, validation


def is_validation_file(file: str) -> bool:
    digest = hashlib.sha256(file.encode()).digest()
    return int.from_bytes(digest[:8], "big") < _VALIDATION_SHARE * 2**64


def _source_files(folder: Path) -> list[str]:
    """Relative paths with "/", sorted: the order must not depend on the file system."""
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        files += [Path(parent, name).relative_to(folder).as_posix() for name in names if name.endswith(".py")]
    return sorted(files)


def _read_file(folder: Path, file: str) -> Iterator[StdlibSample]:
    try:
        source = (folder / file).read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a template, or an old encoding: not Python for this interpreter
        return
    lines = source.split("\n")  # not splitlines: ast counts no form feeds
    for node in _documented(tree):
        docstring = node.body[0]
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        indent = lines[start][: node.col_offset]
        own = [line.removeprefix(indent) for line in lines[start : node.end_lineno]]
        assert docstring.end_lineno is not None
        yield StdlibSample(file, "\n".join(own[: docstring.end_lineno - start]), "\n".join(own))


def _documented(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Definitions with a docstring, outer ones first. Looks into statements only: expressions hold no definitions, and
    they are most of a tree."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        inner: list[ast.AST] = []
        for field in ("body", "handlers", "cases", "orelse", "finalbody"):
            children = getattr(node, field, None)
            if isinstance(children, list):
                inner += children
        pending += reversed(inner)
        if isinstance(node, _Definition) and ast.get_docstring(node, clean=False):
            yield node


@contextmanager
def _quiet_and_fast() -> Iterator[None]:
    """Without the collector, which would walk the young trees again and again, and without the parser's warnings."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if was_enabled:
            gc.enable()
