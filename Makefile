# samebits: `make run` and `make test` set up everything they need. See README.md.
# Variables: PYTHON (interpreter for the virtual environment), SAMEBITS_TORCH (what pip installs for PyTorch).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test matrix lint setup clean

run: setup
	$(BIN)/samebits run quick

test: setup
	$(BIN)/python -m pytest -q -n auto

matrix: setup
	$(BIN)/python -m pytest -q -m matrix

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

setup:
	@sh .ci/setup.sh $(PYTHON) $(VENV)

clean:
	rm -rf $(VENV) .samebits
