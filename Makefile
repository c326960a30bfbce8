# Set-up, checks and tests. `make demo` and `make test` work on a fresh machine with Python >= 3.11.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
VENV4 ?= .venv-transformers4
STAMP4 = $(VENV4)/.installed
PROMPT ?= Write a Python class Stack with push, pop, peek and is_empty, and show how it is used.
TRANSFORMERS4_TESTS ?= tests/test_models.py tests/test_loading.py tests/test_llm.py tests/test_families.py

.PHONY: install demo fix check test test-transformers4 triton-test gpu-test build clean

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

$(STAMP4): pyproject.toml constraints-transformers4.txt
	$(PYTHON) -m venv $(VENV4)
	$(VENV4)/bin/python -m pip install --quiet --constraint constraints-transformers4.txt --editable ".[dev]"
	touch $@

test-transformers4: $(STAMP4)
	$(VENV4)/bin/python -m pytest -m "not e2e" $(TRANSFORMERS4_TESTS)

# The Triton kernels on the CPU, through Triton's interpreter.
triton-test: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt triton
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/test_triton_attention.py tests/test_layer_ops.py

gpu-test:
	$(PYTHON) -m pytest -m gpu -p no:cacheprovider tests/test_gpu.py tests/test_step_graph.py tests/test_triton_attention.py tests/test_layer_ops.py

build: install
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) $(VENV4) build dist *.egg-info
