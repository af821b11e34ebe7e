# Everything starts here: `make serve`, `make test`. The environment is .venv; a second run installs nothing.
#
#   PYTHON=python3.12   another interpreter (3.11 or newer)
#   TORCH_INDEX=URL     a wheel index with CPU builds of PyTorch, where the default one holds gigabytes of CUDA:
#                       make serve TORCH_INDEX=<the CPU index that PyTorch's install page names>
#   MODEL=NAME          what `serve` and `bench` load          ARGS="..."  more flags for `serve`, `bench`, `test`

SHELL := /bin/bash
VENV ?= .venv
MODEL ?= smollm2-135m
ARGS ?=
TORCH_INDEX ?=
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
PIP_FLAGS := $(if $(filter-out 0,$(HAS_GPU)),,-c constraints-cpu.txt) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install $(PIP_FLAGS)

.PHONY: help install dev serve test test-gpu matrix verify soak lint bench bench-host bench-gpu clean

help:
	@echo "make serve    fetch the default model and serve it on http://127.0.0.1:8000"
	@echo "make test     run the whole test suite"
	@echo "make matrix   every setting of the equality matrix, and prompts of thousands of tokens (about 10 minutes)"
	@echo "make verify   explore the scheduling protocol and its rivals exhaustively, find planted bugs, then simulate 1000 groups with faults"
	@echo "make soak     mixed requests for 10 minutes; fails on an error or where a process's memory goes on growing"
	@echo "make install  make .venv and install Slipstream into it"
	@echo "make lint     ruff and pyright"
	@echo "make bench    start a server, measure it, print the table"
	@echo "make bench-host    what a step costs the host, without a GPU"
	@echo "make test-gpu, bench-gpu    where GPUs are: their tests, into docs/gpu_runs.md; the dense table, into docs/benchmarks.md"
	@echo "make clean    remove .venv and caches (fetched models stay)"

$(VENV)/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "Slipstream needs Python 3.11 or newer; none was found. Install one, or name it: make serve PYTHON=/path/to/python3.12"; \
		exit 1; fi
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

$(VENV)/.installed: pyproject.toml constraints-cpu.txt | $(VENV)/bin/python
	$(PIP) -e ".[voice]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints-cpu.txt | $(VENV)/bin/python
	$(PIP) -e ".[dev,voice]"
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed

dev: $(VENV)/.installed-dev

serve: install
	@exec $(VENV)/bin/slipstream serve $(MODEL) $(ARGS)

test: dev
	$(VENV)/bin/python -m pytest $(ARGS)

matrix: dev
	$(VENV)/bin/python -m pytest tests/matrix -m "slow or not slow" $(ARGS)

bench-host: install
	$(VENV)/bin/python -m slipstream.bench.micro.host $(ARGS)

verify: install
	$(VENV)/bin/slipstream verify $(ARGS)
	$(VENV)/bin/slipstream verify --mutants
	$(VENV)/bin/slipstream verify --simulate --seeds 0..999 --jobs 2

soak: install
	$(VENV)/bin/python -m slipstream.bench.load.soak --serve "$(MODEL)" $(ARGS)

lint: dev
	@$(VENV)/bin/python tests/gpu/record.py --check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

bench: install
	$(VENV)/bin/slipstream bench closed --serve "$(MODEL)" --concurrency 4 --input-len 32 --long-share 0 --output-len 128 $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find slipstream tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Where two GPUs are: the operations against float64, the executor against the CPU's, into docs/gpu_runs.md; the dense table, into
# docs/benchmarks.md.
test-gpu: dev
	$(VENV)/bin/python tests/gpu/record.py $(ARGS)

bench-gpu: install
	$(VENV)/bin/python -m slipstream.bench.load.gpu_table --markdown docs/benchmarks.md $(ARGS)
