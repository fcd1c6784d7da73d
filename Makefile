# The two commands of the README, each with all the set-up it needs; and what a developer needs beside them.
VENV ?= .venv
PYTHON ?= python3
# torch is pinned for the virtual environment only (the project itself takes 2.11 to 2.13); name another to try it.
TORCH ?= torch==2.13.0
ARGS ?=

.PHONY: sweep test test-all lint site docs clean

sweep: $(VENV)/.installed
	$(VENV)/bin/python -m lorabench.sweep $(ARGS)

PYTEST = $(VENV)/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder --durations=20 --durations-min=5

# Every kernel, toggle, outcome and command at least once, in minutes.
test: $(VENV)/.installed
	$(PYTEST) -m "not exhaustive" $(ARGS)

# And the remainder of every grid, a Ray cluster of three nodes, the notebooks, and the page in a Chromium where there is one.
test-all: $(VENV)/.installed-all
	$(PYTEST) $(ARGS)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# lorabench depends on lorakernels, which no index needs to have: pip takes the one that it is given beside it.
$(VENV)/.installed: pyproject.toml kernels/pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --upgrade pip
	$(VENV)/bin/pip install -q '$(TORCH)'
	$(VENV)/bin/pip install -q -e ./kernels -e '.[test]'
	touch $@

$(VENV)/.installed-all: $(VENV)/.installed
	$(VENV)/bin/pip install -q -e ./kernels -e '.[test,ray,browser,notebook]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(VENV)/bin/pip install -q -e ./kernels -e '.[docs]'
	touch $@

# The site, into site/: from files alone, without a network. Its first page is the leaderboard of all that lies below
# results/, or below RESULTS=FOLDER; then docs/*.md, README.md, kernels/README.md and a page for each results folder.
docs: site
site: $(VENV)/.installed-docs
	RESULTS=$(RESULTS) $(VENV)/bin/mkdocs build --strict $(ARGS)

clean:
	rm -rf $(VENV) output site build dist .pytest_cache .ruff_cache
