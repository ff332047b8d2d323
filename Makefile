# `make book` and `make test` each work on their own: they create .venv, install the pinned requirements and do their job.

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS  ?= 2

# The first Python between 3.11 and 3.13 found; `make PYTHON=/path/to/python …` overrides it.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
            $$python -c '$(SUPPORTED)' 2>/dev/null && { echo $$python; break; }; done)

# One thread a process: sums are added in the same order whatever the number of cores, and test workers don't compete.
export OMP_NUM_THREADS := 1

# nbval compares outputs that were made on the CPU, so the labs are checked there too.
LABS_ON_CPU := CUDA_VISIBLE_DEVICES=
NBVAL := --nbval --nbval-current-env --nbval-cell-timeout=120 --nbval-sanitize-with tests/nbval_sanitize.cfg

.DEFAULT_GOAL := help
.PHONY: help env book serve test pages lighthouse pdf labs lint hooks clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP)  ## create .venv with the pinned requirements and this package

$(STAMP): requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; name one with make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

book: env  ## build the book into _build/html; any warning is an error
	$(BIN)/jupyter-book build . -W -n --keep-going

serve: book  ## build the book and serve it on http://localhost:8000
	$(BIN)/python -m http.server --bind localhost --directory _build/html 8000

test: env  ## test the library, then run every lab and compare its outputs with the committed ones
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not pages"
	$(LABS_ON_CPU) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(NBVAL) notebooks

pages: book  ## build the book and open every page in a browser (chromium), wide and narrow, light and dark
	$(BIN)/python -m pytest -n $(JOBS) -m pages tests/test_pages.py

lighthouse: book  ## how fast the pages are on a phone (needs npm and chromium, and a machine with nothing else to do)
	$(BIN)/python tests/lighthouse.py --out book/data/lighthouse.json

pdf: book  ## build the book and print it into _build/flce.pdf, with chromium (installed if that is allowed)
	.ci/chromium --korean
	$(LABS_ON_CPU) $(BIN)/python book/print_pdf.py

labs: env  ## re-execute the labs in place (all, or make labs LABS="notebooks/01_the_spike.ipynb")
	$(LABS_ON_CPU) $(BIN)/python notebooks/execute.py $(LABS)

lint: env  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

hooks: env  ## check every commit before it is made (pre-commit)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pre-commit==4.7.0
	$(BIN)/pre-commit install

clean:  ## remove what was built and cached (not .venv)
	rm -rf _build build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
