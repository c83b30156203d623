PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow check clean

## demo: generate text with the four methods and compare them
demo: $(STAMP)
	$(BIN)/tfm compare

## test: run the test suite
test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n 2

## test-slow: run the tests that take minutes each
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow -n 2

## check: lint, format, types
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: run make PYTHON=python3.12"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV)
