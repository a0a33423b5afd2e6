# `make train` and `make test` do all set-up by themselves; they need python3 (3.11 or newer, with venv) and nothing else.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check --no-input
# Written last, so that an interrupted installation is repeated, and so is one whose pinned versions have changed.
STAMP := $(VENV)/.installed

# One thread per process unless a process asks for more: many processes share the cores.
export OMP_NUM_THREADS = 1
# Neither another active environment nor personal pip settings may decide where packages come to lie.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX

.PHONY: help install train test test-all lint bench bench-all bench-reliability bench-scores clean

help:
	@echo "make train     set up, train CartPole-v1 to a mean return of 475, say what to type next"
	@echo "make test      set up, run the tests (at most 10 minutes)"
	@echo "make test-all  the same with the slow tests"
	@echo "make lint      ruff and mypy"
	@echo "make bench     speed of the framework alone"
	@echo "make bench-all every benchmark of speed and learning, peers included, then docs/performance.md (over two hours)"
	@echo "make bench-reliability  figures of docs/reliability.md and docs/self_play.md (several hours)"
	@echo "make bench-scores  what the presets reach, then docs/results.md (four hours)"
	@echo "make clean     remove everything these commands made, except train_dir"

install: $(STAMP)

train: install
	$(RUN) train_appo.py --env=CartPole-v1 --train_until_return=475
	@echo
	@echo "CartPole is solved. What next?"
	@echo "  $(VENV)/bin/appo enjoy --env=CartPole-v1            watch it (--no_render on a machine without a display)"
	@echo "  $(VENV)/bin/appo train --env=Acrobot-v1             train another environment"
	@echo "  $(VENV)/bin/appo train --env=my_module:MyEnv        train your own, a gymnasium.Env in my_module.py"
	@echo "  $(VENV)/bin/appo train --help                       all flags"
	@echo "  $(VENV)/bin/appo plot <run> -o curve.png            its learning curve; of runs of more than 5 s it is in train_dir/<run>/README.md"
	@echo "All figures are in train_dir/<run>/metrics.jsonl; tensorboard --logdir=train_dir draws them (pip install tensorboard)."

test: install
	$(RUN) -m pytest -q -m "not slow" --durations=25 -n 3 --dist loadfile --no-loadscope-reorder

# The pursuit game needs scipy, and TensorBoard reads what runs have written for it.
test-all: test
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e ".[large,hub,wandb,trackio,mlflow,ray]" scipy tensorboard
	$(RUN) -m pytest -q -m slow --durations=20 -n 2 --dist loadfile --no-loadscope-reorder

lint: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: install
	$(RUN) -m benchmarks.speed.framework

# Every result anew. The peers install themselves under ~/.cache/appo-benchmarks; nothing else should run meanwhile.
bench-all: install
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e ".[bench]"
	for name in speed.framework speed.growth speed.env_alone speed.network_alone speed.end_to_end speed.placements \
			scores.learning scores.population speed.policies peers; do \
		$(RUN) -m benchmarks.$$name --json=benchmarks/results/$${name##*.}.json || exit; \
	done
	$(RUN) -m benchmarks.report

# The same for what is promised; a promise that is not kept is printed and goes into the file.
bench-reliability: install
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e ".[bench,ray,lz4]"
	for name in promises.recovery promises.under_fire promises.supervision promises.evaluation promises.cycles \
			promises.soak promises.chatter promises.ranks promises.machines scores.self_play; do \
		$(RUN) -m benchmarks.$$name --json=benchmarks/results/$${name##*.}.json || true; \
	done
	$(RUN) -m benchmarks.report

# Only what the file does not hold yet, so that an interrupted measurement goes on. The pursuit game needs scipy.
bench-scores: install
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e ".[bench,large]" scipy
	$(RUN) -m benchmarks.scores --add --json=benchmarks/results/scores.json
	$(RUN) -m benchmarks.report

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first, by its pinned version, so that nothing else can choose another.
$(STAMP): constraints.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "error: Python 3.11 to 3.13 is needed: make PYTHON=python3.13")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch setuptools wheel
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e ".[all,dev]"
	@touch $@
