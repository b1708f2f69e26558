# Needs make and Python 3.11 or newer; everything else goes into $(VENV). A bare `make` prints the targets.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALL = $(BIN)/python -m pip --disable-pip-version-check install --quiet --editable
PACKAGES = compress models pipeline launch

.PHONY: help quickstart test lint format types clean

help: ## Print this list.
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

quickstart: $(VENV)/installed ## Install Thinwire into .venv and train a small model cut into stages.
	$(BIN)/thinwire train quickstart

test: lint types ## Install what development needs, then check style and types and run the tests.
	$(BIN)/pytest

lint: $(VENV)/installed-dev ## Check the code's style and format.
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(VENV)/installed-dev ## Mend the code's style and format where that can be done mechanically.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# mypy does not follow the import hook of an editable install, so it is shown the folders laid out as the package.
types: $(VENV)/installed-dev ## Check the types.
	@mkdir -p $(VENV)/layout/thinwire
	@for package in $(PACKAGES); do ln -sfn "$(CURDIR)/$$package" $(VENV)/layout/thinwire/$$package; done
	MYPYPATH=$(VENV)/layout $(BIN)/mypy $(PACKAGES:%=-p thinwire.%)

clean: ## Delete what make and the tools made: .venv, caches, builds; your runs stay.
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find $(PACKAGES) tests -name __pycache__ -prune -exec rm -rf {} +

# Stamps: installed once, and again when the package's description changes.
$(VENV)/installed: setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("Thinwire needs Python 3.11 or newer, \
	and $(PYTHON) is %d.%d: name another, as in make PYTHON=python3.13" % v)'
	@echo "Installing Thinwire and torch into $(VENV): minutes and gigabytes, but once."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) '.[dev]'
	@touch $@
