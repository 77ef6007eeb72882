"""The standard library as data: what is read, once, in which order, and how it is split."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from odb_lightning.data import read_stdlib, split_by_file
from odb_lightning.data.stdlib import EXCLUDED_FOLDERS

SOURCE = '''
class Shape:
    """A shape.

Not indented.
    """

    @property
    def area(self):
        """The area."""
        def helper():
            \'\'\'Nested.\'\'\'
        return 1

    def undocumented(self):
        return 2

if True:
    async def fetch(a,
                    b):
        "One line."
        await b
else:
    def never(): "Here."
'''


@pytest.fixture(scope="module")
def samples():
    return read_stdlib()


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        file = folder / (name.replace("__", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def test_methods_nested_and_async_definitions_are_read_in_the_order_of_lines(tmp_path):
    samples = read_stdlib(write(tmp_path, shapes=SOURCE))
    assert [sample.prompt.split("\n")[0] for sample in samples] == [
        "class Shape:",
        "@property",
        "def helper():",
        "async def fetch(a,",
        'def never(): "Here."',
    ]


def test_prompt_is_signature_and_docstring_and_answer_the_whole_source_without_indentation(tmp_path):
    area = read_stdlib(write(tmp_path, shapes=SOURCE))[1]
    assert area.prompt == '@property\ndef area(self):\n    """The area."""'
    assert area.answer == area.prompt + "\n    def helper():\n        '''Nested.'''\n    return 1"


def test_exact_duplicates_and_folders_of_tests_are_left_out_and_files_are_sorted(tmp_path):
    def one(name):
        return f"def {name}():\n    'Doc.'\n"

    write(tmp_path, z=one("a"), b=one("b"), a=one("a"), a__c=one("c"), a__tests__x=one("x"), test__y=one("y"), broken="def (")
    assert [sample.file for sample in read_stdlib(tmp_path)] == ["a.py", "a/c.py", "b.py"]


def test_an_interpreter_without_sources_is_told_the_mend(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"zipped, stripped.*data=sft data\.path=FILE"):
        read_stdlib(tmp_path)


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the count is that of Python 3.11.7")
def test_the_count_on_python_3_11_7(samples):
    assert len(samples) == 7186


def test_every_answer_is_python_begins_with_its_prompt_and_occurs_once(samples):
    assert len(samples) > 3000
    assert len({(sample.prompt, sample.answer) for sample in samples}) == len(samples)
    assert all(sample.answer.startswith(sample.prompt) for sample in samples)
    assert not any(EXCLUDED_FOLDERS & set(sample.file.split("/")) for sample in samples)
    for sample in samples[::50]:
        ast.parse(sample.answer)


def test_split_keeps_files_whole_and_does_not_depend_on_what_else_is_there(samples):
    train, validation = split_by_file(samples)
    assert len(train) + len(validation) == len(samples)
    train_files, validation_files = ({sample.file for sample in part} for part in (train, validation))
    assert not train_files & validation_files
    assert 0.02 < len(validation_files) / len(train_files | validation_files) < 0.08
    assert split_by_file(reversed(samples[::3]))[1] == [
        sample for sample in reversed(samples[::3]) if sample in set(validation)
    ]
