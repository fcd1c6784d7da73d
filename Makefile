# The two commands of the README, each with all the set-up it needs; and what a developer needs beside them.
VENV ?= .venv
PYTHON ?= python3
# torch is pinned for the virtual environment only (the project itself takes 2.11 to 2.13); name another to try it.
TORCH ?= torch==2.13.0
# The releases of everything else with which all tests passed, for the same environment only: a release of today cannot
# break it. CONSTRAINTS=/dev/null takes the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
ARGS ?=
INSTALL = $(VENV)/bin/pip install -q -c $(CONSTRAINTS) -e ./kernels
EVERYTHING = test,ray,browser,notebook,deepspeed

.PHONY: sweep test test-all lint site docs upgrade clean

sweep: $(VENV)/.installed
	$(VENV)/bin/python -m lorabench.sweep $(ARGS)

# What Python and pytest have compiled is kept, whatever the shell says: each process compiles all tests anew otherwise.
WORKERS = 2
PYTEST = PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --durations=20 --durations-min=5

# Every kernel, toggle, outcome and command at least once, in minutes: with a third worker on two cores, because one of
# them often waits for a process.
test: WORKERS = 3
test: $(VENV)/.installed
	$(PYTEST) -m "not exhaustive" $(ARGS)

# And the remainder of every grid, a Ray cluster of three nodes, DeepSpeed, the notebooks, and the page in a Chromium where
# there is one.
test-all: $(VENV)/.installed-all
	$(PYTEST) $(ARGS)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# lorabench depends on lorakernels, which no index needs to have: pip takes the one that it is given beside it.
$(VENV)/.installed: pyproject.toml kernels/pyproject.toml setup.py $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --upgrade pip
	$(VENV)/bin/pip install -q '$(TORCH)'
	$(INSTALL) -e '.[test]'
	touch $@

# DeepSpeed is built from its sources in some twenty seconds, without a compiler.
$(VENV)/.installed-all: $(VENV)/.installed
	DS_BUILD_OPS=0 $(INSTALL) -e '.[$(EVERYTHING)]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) -e '.[docs]'
	touch $@

# The site, into site/: from files alone, without a network. Its first page is the leaderboard of all that lies below
# results/, or below RESULTS=FOLDER; then docs/*.md, README.md, kernels/README.md and a page for each results folder.
docs: site
site: $(VENV)/.installed-docs
	RESULTS=$(RESULTS) $(VENV)/bin/mkdocs build --strict $(ARGS)

# The newest releases into constraints.txt; the tests then say whether they may stay. torch, and what it pins, is TORCH's.
upgrade:
	$(PYTHON) -m venv $(VENV)-newest
	DS_BUILD_OPS=0 $(VENV)-newest/bin/pip install -q '$(TORCH)' -e ./kernels -e '.[$(EVERYTHING),docs]'
	$(VENV)-newest/bin/pip freeze --exclude-editable | grep -vE '^(torch|triton|nvidia-.*|cuda-.*)==' > constraints.txt
	rm -rf $(VENV)-newest

clean:
	rm -rf $(VENV) output site build dist .pytest_cache .ruff_cache
