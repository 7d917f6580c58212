PYTHON ?= python3
PROCESSES ?= 2
ARGS ?=
OUT ?= runs/gpu

BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
# Without bytecode of gradwire, every process would compile it again, in 0.2 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test test-all test-integrations test-torch gpu soak lint docs docs-serve docs-check package matrix clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1	/p' $(MAKEFILE_LIST)

train: .venv/.train  ## train a small GPT on 2 processes (PROCESSES=N) for a minute; options pass through: ARGS="--compare ddp"
	@echo "Training a small GPT on $(PROCESSES) processes. A minute of training begins when all is loaded and compiled."
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(PROCESSES) \
		-m gradwire.bench train --seconds 60 --out runs/quickstart $(ARGS)

# More workers than cores: while one waits for a deadline, another computes.
PYTEST := $(BIN)/python -m pytest tests -n 3 --dist worksteal

test: .venv/.test  ## run the tests but the widest sweeps, in 5 to 10 minutes; options pass through: ARGS="-k NAME"
	$(PYTEST) -m "not wide" $(ARGS)

test-all: .venv/.test  ## run all tests, in about 10 minutes; options pass through
	$(PYTEST) $(ARGS)

test-integrations: .venv/.test .venv/.integrations  ## run docs/integrations with the frameworks that they are for
	$(BIN)/python -m pytest tests/ranks/test_integrations.py $(ARGS)

test-torch: .venv/.test  ## run torch's own tests of a backend for gloo and for gradwire; options pass through: ARGS="-k reduce"
	$(BIN)/python -m tests.torch_distributed $(ARGS)

gpu:  ## on a machine with a GPU: tests/gpu and `bench gpu` with PYTHON as it is, in 9 minutes; the output goes to OUT=FOLDER
	PYTHON=$(PYTHON) sh tests/gpu/check.sh $(OUT)

soak: .venv/.test  ## random operations and random faults for an hour or more; options pass through: ARGS="--seed 7 --faults 20"
	$(BIN)/python -m tests.soak $(ARGS)

lint: .venv/.lint  ## check style, types and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict gradwire
	$(BIN)/lint-imports

docs: .venv/.docs  ## build the site into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-check: docs .venv/.browser  ## build the site and look at every page in Chromium; options pass through: ARGS="--pictures DIR"
	$(BIN)/python -m tests.browser build/site $(ARGS)

docs-serve: .venv/.docs  ## show the site at http://127.0.0.1:8000 and follow what you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

package: .venv/.package  ## build the source distribution and the wheel in dist/, and check what an index would
	rm -rf build dist
	$(BIN)/python -m build --installer pip
	$(BIN)/python -m twine check --strict dist/*
	for file in .ci/run Makefile docs/algorithms.md noxfile.py tests/unit/test_reports.py; do \
		tar -tzf dist/*.tar.gz | grep "/$$file$$" > /dev/null || { echo "the source distribution lacks $$file"; exit 1; }; done
	for file in gradwire/collectives/kernels/cuda/codecs.cuh gradwire/py.typed gradwire/trainer/tools/report/page.html; do \
		$(BIN)/python -m zipfile -l dist/*.whl | grep "^$$file " > /dev/null || { echo "the wheel lacks $$file"; exit 1; }; done
	! $(BIN)/python -m zipfile -l dist/*.whl | grep -vE "^(File Name|gradwire/|gradwire-[^/]*\.dist-info/)" || \
		{ echo "the wheel installs more than gradwire"; exit 1; }
	! tar -tzf dist/*.tar.gz | grep -E "^[^/]*/([^/]*\.py|[^/]*/__init__\.py)$$" | grep -vE "/(gradwire|tests)/__init__\.py|/noxfile\.py" || \
		{ echo "the source distribution holds another package than gradwire"; exit 1; }

matrix: .venv/.matrix  ## run a smoke test on every Python found here, with the oldest and newest packages claimed
	$(BIN)/python -m nox $(if $(ARGS),-- $(ARGS))

clean:  ## remove what the other targets made: .venv, caches, dist, runs/quickstart
	rm -rf .venv .nox .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info runs/quickstart
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One virtual environment; a stamp says which extra of pyproject.toml has been installed into it. pip says nothing for minutes.
.venv/.%: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing gradwire and what its extra [$*] needs into .venv, which takes a minute or two at first."
	@test -d .venv/lib/python3*/site-packages/torch || echo "Torch is the largest part: 200 MB to load for the CPU alone," \
		"some gigabytes with CUDA, which is what PyPI has for Linux. For the CPU alone stop this, and give make a" \
		"PIP_EXTRA_INDEX_URL: the address of the index for CPUs, from the installation page of PyTorch."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv
