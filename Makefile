# samebits: `make run` and `make test` set up everything they need; `make vllm` adds vLLM's CPU build. See README.md.
# Variables: PYTHON (interpreter for the virtual environment), SAMEBITS_TORCH (what pip installs for PyTorch).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test matrix lint setup vllm clean

run: setup
	$(BIN)/samebits run quick

test: setup
	$(BIN)/python -m pytest -q -n auto --dist loadgroup

matrix: setup
	$(BIN)/python -m pytest -q -m matrix

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

setup:
	@sh .ci/setup.sh $(PYTHON) $(VENV)

vllm: setup
	@sh .ci/vllm.sh $(VENV)

clean:
	rm -rf $(VENV) .samebits
