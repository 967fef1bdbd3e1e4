# make demo    sets up and trains on 2 ps and 3 workers here        make test    sets up and runs the tests
# make check   style, types, arrows                                 make bench   the measurements of docs/reference/performance.md

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.9
export UV_COMPILE_BYTECODE := 1
export UV_PYTHON := $(BIN)/python

.PHONY: setup demo test check bench lock clean

setup: $(VENV)/.ready

# Bytecode is compiled once here: it halves the time that each of five tasks takes to import TensorFlow.
$(VENV)/.ready: requirements.lock.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"Muster needs Python 3.11 to 3.13, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.12")'
	@echo "setting up $(VENV) (TensorFlow is about 270 MB)"
	@$(PYTHON) -m venv $(VENV)
	@command -v uv >/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@PATH="$(PATH):$(CURDIR)/$(BIN)" uv pip sync --require-hashes requirements.lock.txt
	@PATH="$(PATH):$(CURDIR)/$(BIN)" uv pip install --quiet --no-deps --editable .
	@touch $@

demo: setup
	$(BIN)/muster run examples/mnist.py

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check src tests examples bench
	$(BIN)/ruff format --check src tests examples bench
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_layers.py

bench: setup
	PATH="$(PATH):$(CURDIR)/$(BIN)" uv pip install --quiet --group bench
	$(BIN)/python -m bench

# The lock has hashes and no addresses of any index.
lock: setup
	PATH="$(PATH):$(CURDIR)/$(BIN)" uv pip compile --quiet --universal --python-version 3.11 --extra cpu --extra legacy-keras --group dev \
	  --generate-hashes --no-header --no-emit-index-url --no-annotate pyproject.toml -o requirements.lock.txt

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
