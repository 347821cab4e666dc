# Two commands are all a newcomer needs: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test test-slow lint types docs docs-tools package clean

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

test-slow: .venv/ready-ray
	$(BIN)/python -m pytest -m 'slow or not slow' --override-ini timeout=3600

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

# The site, in site/: pages, notebooks and the docstrings of the code. Open site/index.html.
docs: docs-tools
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "Open site/index.html in a browser."

docs-tools: .venv/ready-docs

# Each of these extras has a marker of its own: who only tests needs neither.
.venv/ready-%: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    --no-build-isolation --editable '.[$*]'
	touch $@

# What would be published, in dist/, and whether its description can be shown.
package: .venv/ready-release
	rm -rf build dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf .venv build dist site demo .pytest_cache .ruff_cache .mypy_cache
