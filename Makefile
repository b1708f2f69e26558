# Needs make and Python 3.11 to 3.13; everything else goes into $(VENV). A bare `make` prints the targets.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
LAYOUT = $(VENV)/layout
INSTALL = $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile $(UPGRADE) --editable
# pip would use one core for it, and not beside other work; some packages hold files for other versions of Python, and
# most tests and models of packages are never imported: a third of all
COMPILE = $(BIN)/python -m compileall -q -j 0 -x '/tests/|/transformers/models/' $(VENV)/lib $(PACKAGES) >/dev/null 2>&1 || true
# in the order of tests/conftest.py: xdist's own order has the files with the fewest tests last, which take longest
WORKERS = --numprocesses auto --dist loadfile --no-loadscope-reorder
# for thousands of runs, whose files a disk would take longer to write than the runs take
IN_MEMORY = $(if $(wildcard /dev/shm),TMPDIR=/dev/shm)
# pytest keeps the tests as it compiles them, and Numba its kernels: once here, and not once in each worker
COMPILE_TESTS = $(BIN)/pytest --quiet -k 'kernels_for_the_cpu or operations_and_kernels' >/dev/null 2>&1 || true
PACKAGES = errors compress models pipeline launch
# an environment with the newest torch that setup.cfg allows, or with the release that TORCH names
NEWEST = build/$(or $(TORCH:%=torch-%),newest)
# with the tests and not before them: by itself it would leave a core idle
MYPY = MYPYPATH=$(LAYOUT) $(BIN)/mypy
TYPES = $(MYPY) $(PACKAGES:%=-p thinwire.%) && $(MYPY) examples && $(MYPY) docs/measured docs/studies
# also where a shell says otherwise: each worker would rewrite the assertions of all tests, and each new interpreter
# compile what has changed since the installation
export PYTHONDONTWRITEBYTECODE =

.PHONY: help quickstart test browser test-fast test-newest newest test-gpu bench-gpu drill damage torn fuzz soak lint format types docs clean

help: ## Print this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

quickstart: $(VENV)/compiled ## Install Thinwire into .venv and train a small model cut into stages.
	$(BIN)/thinwire train quickstart --overwrite
	@echo "To call thinwire yourself: . $(BIN)/activate in this shell, or for every shell: pipx install . (or: uv tool install .)"
	@echo "Then, for example: thinwire train quickstart --codec 'q(2)/q(6)' --output runs/two-bits"

test: $(VENV)/installed-dev $(LAYOUT) ## Install what development needs, then check style and types and run the tests; closes with what this machine could not run.
	@$(MAKE) --no-print-directory --jobs 4 --output-sync lint browser $(VENV)/compiled-dev
	@($(TYPES)) >$(VENV)/types.txt 2>&1 & types=$$!; \
	$(BIN)/pytest $(WORKERS) --durations 10; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.txt; exit $$((tests | types))

browser:
	@sh tests/support/browser.sh

test-fast: $(VENV)/compiled-dev ## Run the tests that need no processes and little time: about a minute on two cores.
	$(BIN)/pytest $(WORKERS) -m "not processes and not namespaces and not slow"

# whatever pip's configuration holds back
test-newest: export PIP_CONFIG_FILE = /dev/null
test-newest: export PIP_CONSTRAINT =
test-newest: ## Install the newest torch that setup.cfg allows (or TORCH=2.11.0), and run there what leans on torch most.
	@$(MAKE) --no-print-directory VENV=$(NEWEST) UPGRADE='--upgrade --upgrade-strategy eager $(TORCH:%=torch==%)' newest

newest: $(BIN)/pip
	@$(if $(TORCH),,$(BIN)/python tests/support/newest.py ask)
	@$(MAKE) --no-print-directory $(VENV)/compiled-dev
	@$(BIN)/python tests/support/newest.py check $(TORCH)
	$(BIN)/thinwire train quickstart --training.steps 8 --output $(VENV)/run --overwrite
	$(BIN)/pytest $(WORKERS) --durations 10 tests/pipeline tests/compress/test_compiled.py

test-gpu: $(VENV)/compiled-dev ## Run the tests that need a CUDA GPU: payloads as on the CPU, runs as simulated there.
	@$(BIN)/pytest -m gpu -ra -k "not one_gpu_over_nccl"; of_most=$$?; \
	echo "Two processes on one GPU, over NCCL, which takes them for two hosts:"; \
	$(BIN)/pytest -m gpu -rA --no-header -k one_gpu_over_nccl tests/launch/test_gpu_runs.py && exit $$of_most

bench-gpu: $(VENV)/compiled-dev ## Measure on a CUDA GPU: codecs beside a copy there, and steps of four stages that share it.
	$(BIN)/python docs/measured/codecs_gpu.py
	$(BIN)/python docs/measured/steps_gpu.py --folder runs/bench-gpu

drill: $(VENV)/compiled-dev ## Kill KILLS (100) stages of one run at random; it must end as an undisturbed one.
	THINWIRE_KILLS=$(or $(KILLS),100) $(BIN)/pytest -rP tests/launch/test_restarts.py

damage: $(VENV)/compiled-dev ## Damage COUNT (1000) checkpoints: the run goes on from one that is whole, or says what is wrong.
	THINWIRE_DAMAGED=$(or $(COUNT),1000) $(BIN)/pytest -rP tests/launch/test_damage.py

torn: $(VENV)/compiled-dev ## Damage the links of COUNT (100) runs of split learning: right weights at both ends, or a sentence. As root.
	THINWIRE_TORN=$(or $(COUNT),100) THINWIRE_FIRST_SEED=$(or $(FIRST),0) $(BIN)/pytest -rP tests/launch/test_damaged_links.py

fuzz: $(VENV)/compiled-dev ## Train under SEEDS (10000) plans of faults in links, disk and process, and mutate FRAMES (100000) frames.
	THINWIRE_SEEDS=$(or $(SEEDS),10000) THINWIRE_FIRST_SEED=$(or $(FIRST),0) THINWIRE_FRAMES=$(or $(FRAMES),100000) \
	$(IN_MEMORY) $(BIN)/pytest --numprocesses auto --dist load -rP tests/launch/test_fuzz.py tests/pipeline/test_frames.py -k "seed or mutated"

soak: $(VENV)/compiled-dev ## Train STEPS (5000) steps: memory, threads, descriptors and disk must not grow.
	THINWIRE_STEPS=$(or $(STEPS),5000) $(BIN)/pytest -rP tests/launch/test_bounded.py

lint: $(VENV)/installed-dev ## Check the code's style and format, and print the lines of each package.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(BIN)/python docs/measured/house.py --lines

format: $(VENV)/installed-dev ## Mend the code's style and format where that can be done mechanically.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/installed-dev $(LAYOUT) ## Check the types of the packages, of the examples and of the scripts in docs/.
	$(TYPES)

docs: $(VENV)/installed-docs $(LAYOUT) ## Build the pages of docs/ and the API reference into build/docs; a warning is an error.
	THINWIRE_LAYOUT=$(LAYOUT) $(BIN)/mkdocs build --quiet
	@echo "The pages begin at build/docs/index.html"

clean: ## Delete what make and the tools made: .venv, caches, builds; your runs stay.
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find $(PACKAGES) tests -name __pycache__ -prune -exec rm -rf {} +

# Stamps: installed once, and again when the package's description changes.
$(VENV)/installed: setup.cfg pyproject.toml | $(BIN)/pip
	$(INSTALL) .
	@touch $@

$(VENV)/installed-%: setup.cfg pyproject.toml | $(BIN)/pip
	$(INSTALL) '.[$*]'
	@touch $(VENV)/installed $@

$(VENV)/compiled: $(VENV)/installed
	@$(COMPILE)
	@touch $@

$(VENV)/compiled-%: $(VENV)/installed-%
	@$(COMPILE)
	@$(COMPILE_TESTS)
	@touch $(VENV)/compiled $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit("Thinwire needs Python 3.11 to 3.13, \
	and $(PYTHON) is %d.%d: name another, as in make PYTHON=python3.13" % v)'
	@echo "Installing Thinwire and torch into $(VENV): minutes and gigabytes, but once."
	$(PYTHON) -m venv $(VENV)

# mypy and mkdocs do not follow the import hook of an editable install: here the folders lie as the package they are.
$(LAYOUT): Makefile
	@mkdir -p $(LAYOUT)/thinwire
	@for package in $(PACKAGES); do ln -sfn "$(CURDIR)/$$package" $(LAYOUT)/thinwire/$$package; done
	@touch $(LAYOUT)
