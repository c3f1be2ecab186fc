# Each target works in a fresh clone: the virtual environment is made on first use.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
PIP := $(VENV)/bin/pip install --quiet
# All that commands need, and what tests, checks and benchmarks need besides.
PRODUCT := $(VENV)/.product
PEERS := $(VENV)/.peers

.PHONY: parity gpu-check gpu-test gpu-bench demo demo-picture test test-slow test-types test-security test-torch lint api format bench clean

$(PRODUCT): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) "torch>=2.11,<2.14"
	$(PIP) --editable .
	touch $@

$(PEERS): $(PRODUCT)
	$(PIP) --editable ".[dev]"
	touch $@

demo: $(PRODUCT)
	$(VENV)/bin/lockstep demo

# The picture in the README, of the demo that ran last.
demo-picture: $(PRODUCT)
	$(VENV)/bin/python -c "from pathlib import Path; from lockstep.observe import curves_png; curves_png(Path('run'), Path('docs/demo.png'))"

# Tests start some hundred processes, and each would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

# Three processes for every two cores (tests/conftest.py), eight at most, of one thread each.
PARALLEL := -n auto --maxprocesses 8 --dist worksteal

test: $(PEERS)
	$(RUN) pytest $(PARALLEL) --durations 15 $(ARGS)

# With every annotation's types and shapes checked.
test-types: $(PEERS)
	LOCKSTEP_CHECK_TYPES=1 $(RUN) pytest $(PARALLEL) tests/ops tests/model tests/generate tests/train tests/rl $(ARGS)

# What `make test` leaves out; for a part of it: make test-slow ARGS=tests/generate
test-slow: $(PEERS)
	$(RUN) pytest $(PARALLEL) -m slow $(ARGS)

# What computes, with another torch, in an environment of its own: make test-torch TORCH=2.14.1
TORCH ?= 2.14.1
TORCH_TESTS := $(addprefix tests/,ops model data generate train parallel checkpoint rl/algorithms rl/scoring \
	rl/test_digest.py)

$(VENV)-torch-%/.peers: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet "torch==$*" --editable ".[dev]"
	touch $@

test-torch: $(VENV)-torch-$(TORCH)/.peers
	$(VENV)-torch-$(TORCH)/bin/python -m pytest $(PARALLEL) --durations 15 $(TORCH_TESTS) $(ARGS)

# 20,000 damaged requests and 2,000 damaged folders, by fixed seeds; `make test` has a fortieth of them.
test-security: $(PEERS)
	$(RUN) pytest -m "slow or not slow" tests/security

lint: $(PEERS)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

# Trainer and generator in every layout against each other; the picture is docs/parity.png.
parity: $(PRODUCT)
	$(VENV)/bin/lockstep parity --matrix full --output parity
	cp parity/parity.png docs/parity.png

# docs/api.md: every public name, with its docstring.
api: $(PEERS)
	$(VENV)/bin/python docs/make_api.py

format: $(PEERS)
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

bench: $(PEERS)
	$(VENV)/bin/python benchmarks/generation.py
	$(VENV)/bin/python benchmarks/training.py
	$(VENV)/bin/python benchmarks/grpo.py
	$(VENV)/bin/python benchmarks/company.py
	$(VENV)/bin/python benchmarks/compile.py
	$(VENV)/bin/python benchmarks/serving.py

# With the GPU machine's own Python: make gpu-check PYTHON=python3. Without a GPU both parts only say so. With
# pytest-xdist, OMP_NUM_THREADS=1 make gpu-test PYTHON=python3 ARGS="-n 14" takes two minutes on 16 cores.
GPU := $(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null

gpu-check: gpu-test gpu-bench

# Without conftest.py: the checking of shapes needs packages that such a machine may lack.
gpu-test:
	@if $(GPU); then PYTHONPATH=. $(PYTHON) -m pytest --noconftest -m gpu $(ARGS) tests/gpu; else echo "no GPU: skipped"; fi

gpu-bench:
	@if $(GPU); then PYTHONPATH=. $(PYTHON) benchmarks/gpu.py; else echo "no GPU: skipped"; fi

clean:
	rm -rf $(VENV) $(VENV)-torch-* run run-pretrain
