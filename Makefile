# make run    sets up .venv and runs the main job (ARGS adds overrides: make run ARGS="odb.l_max=2048 data.limit=500")
# make test   sets up what the tests need, then checks style and types and runs the tests (TESTS adds pytest arguments)
# make clean  removes what these made, but no run's output

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TESTS ?=
BIN := $(VENV)/bin
# Two ranks and their loaders share the cores: more threads than this per process only get in each other's way.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

.PHONY: run test clean

run: $(VENV)/.run-installed
	$(BIN)/odb-train $(ARGS)

test: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	# Two files at a time: much of a test that starts ranks is one process importing while the others wait. In their order: the
	# files that take longest come first.
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hf]'
	touch $@

$(VENV)/.test-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hf,dev]'
	touch $@ $(VENV)/.run-installed
