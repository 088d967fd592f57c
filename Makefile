# Each target sets up what it needs on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_ALL := $(VENV)/.installed-all
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-all lint docs results setup clean

demo: $(STAMP)
	$(BIN)/stfseb compare mini

test: $(STAMP) lint
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadgroup

test-all: $(STAMP_ALL)
	$(BIN)/python -m pytest -m "slow and not gpu" -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP_ALL)
	$(BIN)/mkdocs build --strict

results: $(STAMP)
	$(BIN)/python scripts/make_results.py

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	touch $(STAMP)

$(STAMP_ALL): $(STAMP)
	$(INSTALL) -e '.[dev,browser,docs,export,fuzz,serve]'
	touch $(STAMP_ALL)

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
