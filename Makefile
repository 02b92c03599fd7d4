# Each target works on a fresh machine with Python 3.11 or newer: it makes .venv and installs first.
# `make PYTHON=/path/to/python3.11 test` chooses another Python. Packages are installed by uv, or by
# pip where uv fails; pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) choose where they
# come from.

# The first that runs and is new enough: a name on the PATH may be a shim for a Python that is not
# there.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3, \
    $(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
VENV := .venv
INSTALLED := $(VENV)/.installed-tests
BIN := $(VENV)/bin
# As many processes as tests/conftest.py says; tests that share a module's fixture stay together.
PYTEST_FLAGS ?= -n auto --dist loadgroup --no-loadscope-reorder

.PHONY: compiled demo test test-mutations test-slow test-long test-tpu test-versions test-all lint docs notebooks bench bench-accelerator torture torture-kill torture-hosts \
    torture-flips torture-gcs torture-mirror torture-fuzz torture-endurance torture-power torture-lease clean
.DEFAULT_GOAL := test

# What JAX compiles for tests on this machine, for a week: the next run takes it from there.
COMPILED := $(CURDIR)/build/compiled-$(shell uname -n)
test test-slow test-long test-all: export TORCHAX_CKPT_TESTS_COMPILED := $(COMPILED)
test test-slow test-long test-all: compiled

compiled:
	@mkdir -p $(COMPILED)
	@find $(COMPILED) -type f -mtime +6 -delete

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/demo.py

# What a person waits for: at least one test of every promise.
test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# The others of every change.
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "slow and not long"

# Longer variants of what those tests show, the notebooks, a browser, and each program of a live group
# in processes of its own; before a release.
test-long: $(INSTALLED) $(VENV)/.installed-browser
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m long
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "slow and not long" --new-groups

# Compiles what runs on devices with the TPU compiler, which PyPI's libtpu has; needs no TPU. In one
# process, because libtpu serves only one process at a time.
test-tpu: $(INSTALLED) $(VENV)/.installed-tpu-check
	$(BIN)/python -m pytest -m tpu tests/tpu

# Other releases: each set of tests/versions.toml in a venv under .venvs; all of them need 35 GB, or a
# third of it from an index with PyTorch's CPU builds. SETS="oldest tpu-inference" tries some.
test-versions:
	$(PYTHON) tests/run_versions.py $(SETS)

# Whether a test fails if a promise is broken, for each; MUTATIONS="--row NAME" tries one.
test-mutations: $(INSTALLED)
	$(BIN)/python tests/mutations.py $(MUTATIONS)

test-all: $(INSTALLED) $(VENV)/.installed-browser
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not tpu"
	$(MAKE) test-tpu

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python -m sphinx -W --keep-going -q -d build/docs/trees docs build/docs/html
	@echo build/docs/html/index.html

# Runs the notebooks and keeps what they print and draw.
notebooks: $(INSTALLED)
	$(BIN)/python notebooks/execute.py

bench: $(INSTALLED)
	$(BIN)/python benchmarks/run.py

# What only an accelerator can show; BENCH_ACCELERATOR='--gigabytes 0.4' makes it small.
bench-accelerator: $(INSTALLED)
	$(BIN)/python benchmarks/accelerator.py $(BENCH_ACCELERATOR)

# The long forms of tests/faults; each prints a table.
torture: torture-kill torture-hosts torture-power torture-lease torture-flips torture-gcs torture-mirror torture-fuzz torture-endurance

TORTURE := $(BIN)/python tests/faults/torture.py --fault

# KILLED=2 kills a program of two processes.
KILLS ?= 300
KILLED ?= 1
torture-kill: $(INSTALLED)
	$(TORTURE) kill --count $(KILLS) --processes $(KILLED)

ROUNDS ?= 200
torture-hosts: $(INSTALLED)
	$(TORTURE) hosts --count $(ROUNDS)

# Needs /dev/fuse and the libfuse of the system, in Debian's package libfuse3-3; fails without.
CUTS ?= 300
torture-power: $(INSTALLED)
	$(TORTURE) power --count $(CUTS)

# Needs the same.
LEASES ?= 200
torture-lease: $(INSTALLED)
	$(TORTURE) lease --count $(LEASES)

FLIPS ?= 2000
torture-flips: $(INSTALLED)
	$(TORTURE) flips --count $(FLIPS)

GCS_SAVES ?= 500
torture-gcs: $(INSTALLED)
	$(TORTURE) gcs --count $(GCS_SAVES) $(GCS_FLAGS)

MIRRORED ?= 50
torture-mirror: $(INSTALLED)
	$(TORTURE) mirror --count $(MIRRORED)

INPUTS ?= 100000
torture-fuzz: $(INSTALLED)
	$(TORTURE) fuzz --count $(INPUTS)

# SAVING=2 has two processes save; ENDURANCE_FLAGS=--bucket saves to an emulated bucket.
SAVES ?= 10000
SAVING ?= 1
torture-endurance: $(INSTALLED)
	$(TORTURE) endurance --count $(SAVES) --processes $(SAVING) $(ENDURANCE_FLAGS)

# The package with one of its extras; again only when the dependencies may have changed.
$(VENV)/.installed-%: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it: make PYTHON=..."; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "Installing torchax_ckpt and its extra '$*' into $(VENV): this takes minutes, once."
	$(BIN)/python .ci/install.py $(BIN)/python -e '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) .venvs .uv-cache docs/notebooks .demo .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist
	find benchmarks examples tests torchax_ckpt -name __pycache__ -prune -exec rm -rf {} +
