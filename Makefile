# SPDX-License-Identifier: Apache-2.0
# make demo: environment, install, train a small hybrid on CPU and generate from it.
# make test: environment, the test suite; make test-slow: the cases it leaves out.
# PYTHON=/path/to/python3.13 chooses the interpreter; otherwise tools/find_python.sh does.

VENV ?= .venv
CONSTRAINTS ?= constraints.txt
RUN_DIR ?= runs/demo
PROMPT ?= def main():
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INPUTS := setup.py constraints-common.txt $(CONSTRAINTS)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS)
# The suite runs on CPU; libtpu, where it is installed, only compiles ahead of time.
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-slow test-oldest lint format golden clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/seqmix train --gin_file=configs/demo.gin --run_dir=$(RUN_DIR)
	$(BIN)/seqmix generate --run_dir=$(RUN_DIR) --prompt="$(PROMPT)"

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow $(PYTEST_ARGS)

# The tests with the oldest JAX, on the other one of Python 3.12 and 3.13 where the machine has it.
test-oldest: $(VENV)/.installed-dev
	@version=$$($(BIN)/python -c 'import sys; print({12: "3.13"}.get(sys.version_info[1], "3.12"))'); \
	python=$$(tools/find_python.sh $$version) || python=; \
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt $${python:+PYTHON=$$python}

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Writes tests/golden/*.gin anew; the diff shows what a change does to each recipe.
golden: $(VENV)/.installed
	$(BIN)/python tools/golden.py

clean:
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	python=$$(PYTHON='$(PYTHON)' tools/find_python.sh) && "$$python" -m venv --clear $(VENV)

# Setuptools is pinned like the rest, so pip is not to fetch one of its own for the build.
$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $@
