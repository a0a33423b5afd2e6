# Everything a bare machine needs is python3 (with venv) and make.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
STAMP := $(VENV)/.installed

# One thread per process unless a process asks for more: many processes share the cores.
export OMP_NUM_THREADS = 1
# Another active environment must not leak into ours.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH

.PHONY: help install train test test-all lint bench clean

help:
	@echo "make train     set up, train CartPole-v1 to a mean return of 475, say what to type next"
	@echo "make test      set up, run the test suite (at most 10 minutes)"
	@echo "make test-all  the suite with everything that takes longer"
	@echo "make lint      ruff and mypy"
	@echo "make bench     speed of the framework alone"

install: $(STAMP)

$(STAMP): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	@# torch first, pinned: an unpinned one pulls gigabytes of CUDA packages
	$(PIP) install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --quiet -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

train: install
	$(BIN)/python train_appo.py --env=CartPole-v1 --train_until_return=475
	@echo
	@echo "CartPole is solved. What next?"
	@echo "  watch it play        $(BIN)/python enjoy_appo.py --env=CartPole-v1"
	@echo "  train another env    $(BIN)/python train_appo.py --env=Pendulum-v1"
	@echo "  train your own env   $(BIN)/python train_appo.py --env=my_package.my_module:MyEnv"
	@echo "  all flags            $(BIN)/python train_appo.py --help"

test: install
	$(BIN)/python -m pytest -m "not slow" --durations=10

test-all: install
	$(BIN)/python -m pytest --durations=20

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m benchmarks.framework

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
