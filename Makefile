# Two commands are all a newcomer needs: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test test-slow lint types clean

# Rebuilt only when the requirements change; the marker is written last, so an interrupted install starts over.
# Constrained by constraints.txt, whose torch pin keeps a CPU machine from pulling gigabytes of CUDA packages.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --no-build-isolation --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/fastweights demo

test: $(READY) lint types
	$(BIN)/python -m pytest
	$(BIN)/fastweights report --check

test-slow: $(READY)
	$(BIN)/python -m pytest -m 'slow or not slow' --override-ini timeout=3600

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

clean:
	rm -rf .venv build dist demo .pytest_cache .ruff_cache .mypy_cache
