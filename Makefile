# Two commands set everything up in a private environment: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
# Two workers with one thread each: bit-equality tests then compare like with like, and no core idles. Processes that
# tests start are quicker to start if the bytecode of our modules is kept.
WORKERS ?= 2
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: help demo test lint types soak bench docs release-check clean
help:
	@echo "make demo    five small tasks, learned one after another without forgetting"
	@echo "make test    linters, types and every test"
	@echo "make soak    the long campaigns"
	@echo "make bench   speed and memory, side by side"
	@echo "make docs    the pages as a site, in build/docs"
	@echo "make release-check   wheel and sdist, installed in a fresh environment"

$(STAMP): pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zeroforget needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,docs,dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/zeroforget demo

test: $(STAMP) lint types
	$(PYTEST) -m 'not soak'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

soak: $(STAMP)
	$(PYTEST) -m soak
	$(PYTEST) -m 'hypothesis and not soak' --hypothesis-profile=searching

bench: $(STAMP)
	$(BIN)/python -m benchmarks

docs: $(STAMP)
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

release-check: $(STAMP)
	$(BIN)/python -m tools.release_check

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
