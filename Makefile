# The two commands: `make demo` (debiased densities of real data) and `make test`.
# Both install into .venv; plain pip equivalents are in README.md.

PYTHON ?= python3
VENV ?= .venv
# Without a GPU: the index of PyTorch's CPU wheels, as pytorch.org names it, saves gigabytes.
#   make test TORCH_INDEX=<url>
TORCH_INDEX ?=
JOBS ?= auto

# Windows has Scripts for bin. What follows needs no more than POSIX tools and GNU make 3.81, which macOS has.
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n $(JOBS)

# Every process would compile the tests and the packages anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-full lint format bench docs clean

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
	$(BIN)/python tools/budget.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks run precision approximate footprint tolerances --device cpu --to runs
	$(BIN)/python -m benchmarks report runs

# The site, in build/site: every warning is an error, such as a link to nothing or a docstring that cannot be read. It is
# built anew every time (-E -a, and the pages of the reference), as Sphinx says nothing of pages that have not changed.
# Of docs/api only the pages go whose first line says that this command made them; Sphinx puts a byte order mark before it.
docs: $(VENV)/.docs
	@for page in docs/api/*.rst; do \
	  if head -n 1 "$$page" 2>/dev/null | grep -q '\.\. Made by make docs, which removes it\.$$'; then rm "$$page"; fi; \
	done
	$(BIN)/python -m sphinx -W --keep-going -q -E -a -c docs . build/site

OLD := Python 3.11 or newer is needed; name one, as in make PYTHON=python3.12

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c "import sys; sys.exit('$(OLD)' if sys.version_info < (3, 11) else 0)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(PIP) --constraint constraints.txt --editable ".[demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(if $(TORCH_INDEX),$(PIP) --constraint constraints.txt torch --index-url $(TORCH_INDEX))
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(PIP) --constraint constraints.txt --editable ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info sdkde-demo.png .mypy_cache .ruff_cache .pytest_cache .hypothesis
