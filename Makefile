# The two commands: `make demo` (debiased densities of real data) and `make test`.
# Both install into .venv; plain pip equivalents are in README.md.

PYTHON ?= python3
VENV ?= .venv
# Without a GPU: the index of PyTorch's CPU wheels, as pytorch.org names it, saves gigabytes.
#   make test TORCH_INDEX=<url>
TORCH_INDEX ?=
JOBS ?= auto

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(JOBS)

# Every process would compile the tests and the packages anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-full lint format bench clean

demo: $(VENV)/.demo
	$(BIN)/sdkde demo

test: $(VENV)/.dev
	$(PYTEST) -m "not slow and not gpu" --durations=10

test-full: $(VENV)/.dev lint
	$(PYTEST) -m "not gpu"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/tolerances.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --constraint constraints.txt --editable ".[demo]"
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --constraint constraints.txt torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist *.egg-info sdkde-demo.png .mypy_cache .ruff_cache .pytest_cache .hypothesis
