# Set-up, checks and tests. `make demo` and `make test` work on a fresh machine with Python >= 3.11.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
PROMPT ?= Explain in a few sentences why the sky is blue, then say it again for a child.
TRANSFORMERS4_TESTS ?= tests/test_models.py tests/test_greedy_equality.py tests/test_loading.py

.PHONY: install demo fix check test test-transformers4 gpu-test build clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/specdec generate "$(PROMPT)" --max-tokens 160

fix: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: install
	$(BIN)/python -m pytest

test-transformers4:
	$(PYTHON) -m venv .venv-transformers4
	.venv-transformers4/bin/python -m pip install --quiet \
		--constraint constraints-transformers4.txt --editable ".[dev]"
	.venv-transformers4/bin/python -m pytest -m "not e2e" $(TRANSFORMERS4_TESTS)

gpu-test:
	$(PYTHON) -m pytest -m gpu -p no:cacheprovider tests/test_gpu.py

build: install
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) .venv-transformers4 build dist *.egg-info
