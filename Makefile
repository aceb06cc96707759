# Everything a fresh clone needs: Python 3.11+, git, make. Nothing else by hand.
PYTHON ?= python3
VENV   ?= .venv
OUT    ?= demo-out
# TORCH=https://download.pytorch.org/whl/cpu: without the gigabytes of CUDA
TORCH  ?=
MINUTES ?= 2
SECONDS ?= 60
JOBS   ?= 2
GPU_PYTHON ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python3)
SEED   ?= 1
POLICY ?= priority
FAULTS ?= 0
SOAKS  ?= test_training_kills test_durability test_server_soak test_hostile
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CODE   := pipeswitch workers memory_daemon
LINTED := $(CODE) tests docs benchmarks lint/language.py lint/budgets.py

# Tests start hundreds of processes of this code: it is compiled once, whatever the image says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo check unit test test-extras test-long lint bench-quick bench chaos fuzz model models reliability gpu docs wheel clean
.DEFAULT_GOAL := help

help:  ## Show the targets.
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/python -m pip install --quiet --disable-pip-version-check torch torchvision --index-url $(TORCH))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,demo,bench]'
	@touch $@

demo: $(STAMP)  ## Serve three models beside a training job and measure it; needs no GPU.
	$(BIN)/pipeswitch demo --out $(OUT)

check: $(STAMP)  ## lint and unit side by side: two minutes on two cores.
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint unit

unit: $(STAMP)  ## The unit tests: no process, no socket.
	$(BIN)/python -m pytest -q tests/unit tests/extras/*/unit -n $(JOBS) --dist worksteal

test: $(STAMP)  ## The engine's tests that start real processes, on the cpu device; JOBS=0: one file at a time.
	$(BIN)/python -m pytest -rs --ignore tests/unit --ignore tests/extras -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-extras: $(STAMP)  ## The same for the extras.
	$(BIN)/python -m pytest -rs tests/extras/*/process -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-long: $(STAMP)  ## The slow tests: the demo, a minute of chaos, killed servers and jobs.
	$(BIN)/python -m pytest -m slow -n $(JOBS) --dist loadfile --no-loadscope-reorder

lint: $(STAMP)  ## ruff, its formatter, the bans, plain language, ceilings, spelling, mypy.
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/ruff check --config lint/bans.toml $(CODE)
	$(BIN)/python lint/language.py
	$(BIN)/python lint/budgets.py
	$(BIN)/codespell $(LINTED) packaging *.md
	$(BIN)/mypy

bench-quick: $(STAMP)  ## Short runs of all benchmarks, results in out/.
	$(BIN)/python -m benchmarks all --quick --out out

bench: $(STAMP)  ## One benchmark: make bench NAME=switch ARGS='--trials 5'; without NAME it lists them.
	$(BIN)/python -m benchmarks $(NAME) $(ARGS)

chaos: $(STAMP)  ## Random faults under load: make chaos MINUTES=10 SEED=7 (POLICY=each FAULTS=20: with each policy); report in out/chaos.json.
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --seed $(SEED) --policy $(POLICY) --faults $(FAULTS) --out out/chaos.json

fuzz: $(STAMP)  ## What outsiders can send: make fuzz SECONDS=3600; report in out/fuzz.json.
	$(BIN)/python -c 'import atheris' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --out out/fuzz.json
	$(BIN)/python -m tests.fuzz.fence --seconds $(SECONDS) --out out/fence.json
	$(BIN)/python -m tests.fuzz.fence --inner --seconds $(SECONDS) --out out/inner.json

model: $(STAMP)  ## Every state of the protocol model's scopes, and the seeded bugs; minutes.
	$(BIN)/python -m tests.model --all --processes 2 --out out/model.json

models: $(STAMP)  ## 144 models from torchvision, transformers and others: served to the bit, or why not; goes on where it was cut short.
	$(BIN)/python -m tests.models --rows out/models --out out/models.json

reliability: $(STAMP)  ## The long tests of reliability one after the other, then whether docs/reliability.md still says so; an hour.
	@# Into out/ first: a results file that changes would make the next run call the checkout dirty.
	status=0; for soak in $(SOAKS); do \
		PIPESWITCH_FIGURES=$(CURDIR)/out/reliability \
			$(BIN)/python -m pytest -q -s -m soak tests/process/$$soak.py || status=1; \
	done; \
	cp out/reliability/*.json benchmarks/results/reliability/; \
	$(BIN)/python -m pytest -q tests/unit/test_docs.py -k reliability || status=1; exit $$status

gpu:  ## Prove the cuda device on this machine's GPU (9 minutes).
	$(GPU_PYTHON) -m benchmarks.gpu $(GPU_ARGS)

docs: $(STAMP)  ## The documentation as a site, with search, in out/site; a dead link is an error.
	$(BIN)/python -c 'import mkdocs, mkdocstrings' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

wheel: $(STAMP)  ## What pip installs, in dist/.
	rm -rf build dist  # what was deleted would be in it
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:  ## Remove everything that was made here, the environment included.
	rm -rf $(VENV) $(OUT) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
