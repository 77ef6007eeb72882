"""The wheel holds what the commands need: every package, the configuration, the recipes, the vocabulary."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MAPPED = {"conf": "odb_lightning/conf", "recipes": "odb_lightning/recipes", "odb_lightning": "odb_lightning"}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    source = tmp_path_factory.mktemp("source")
    for name in MAPPED:
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def source_files(*patterns: str) -> list[str]:
    """Files of the source as the wheel names them."""
    found = []
    for folder, packaged in MAPPED.items():
        for pattern in patterns:
            for file in (REPOSITORY / folder).rglob(pattern):
                found.append(f"{packaged}/{file.relative_to(REPOSITORY / folder).as_posix()}")
    return sorted(found)


def test_the_wheel_holds_each_module_configuration_and_data_file(wheel_names: set[str]) -> None:
    wanted = source_files("*.py", "*.yaml", "*.json", "py.typed")
    assert len(wanted) > 50
    assert [name for name in wanted if name not in wheel_names] == []
    assert "odb_lightning/conf/train.yaml" in wheel_names
    assert "odb_lightning/recipes/quickstart.yaml" in wheel_names
    assert "odb_lightning/data/tokenizer.json" in wheel_names


def test_the_wheel_holds_nothing_else_at_the_top(wheel_names: set[str]) -> None:
    assert {name.partition("/")[0] for name in wheel_names} == {"odb_lightning", "odb_lightning-0.1.0.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)


def test_each_configuration_folder_is_a_package() -> None:
    for top in ("conf", "recipes"):
        for folder in [REPOSITORY / top, *(path for path in (REPOSITORY / top).iterdir() if path.is_dir())]:
            if folder.name != "__pycache__":
                assert (folder / "__init__.py").exists(), f"{folder}: Hydra finds packaged configuration in packages only"


def test_every_pin_is_a_plain_version_and_the_command_s_needs_are_pinned() -> None:
    lines = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert pins["torch"] == "2.13.0"
    assert not [pin for pin in pins.values() if "+" in pin]
    assert {"lightning", "deepspeed", "hydra-core", "transformers", "pytest", "ruff", "mypy"} <= set(pins)
