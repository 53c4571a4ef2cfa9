# Every target sets up what it needs in .venv; a second run skips that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
# One more than CI has cores: some tests wait for processes.
JOBS ?= 3

.PHONY: help demo test thorough headroom resolve versions notebooks faults processes serving lint format docs aot emulated counts gpu bench trl-parity hub clean

help:
	@echo "make demo    train a tiny language model with PPO, in minutes on two CPU cores"
	@echo "make test    run the tests and the ahead-of-time gate of the kernels"
	@echo "make thorough  what make test leaves out, and all kernels' options (PART=WORD: a part of it)"
	@echo "make headroom  that what is judged is as exact on other inputs and instruction sets"
	@echo "make resolve  that what make installs resolves for every Python and processor, CUDA and CPU"
	@echo "make versions  demo and tests with the newest and the lowest that pyproject.toml allows"
	@echo "make notebooks  run the notebooks of examples/, and keep their outputs in them"
	@echo "make faults  kill runs of every trainer at many instants, and resume them"
	@echo "make processes  train on two and on four processes, by each launcher"
	@echo "make serving  what is saved, loaded by transformers, PEFT and vLLM, and compared"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff rewrite the sources"
	@echo "make docs    the documentation, in site/: open site/index.html"
	@echo "make aot     the ahead-of-time gate alone, with each Triton that kernels are held to"
	@echo "make emulated  the kernels' tests on what Triton compiles, races looked for, without a GPU"
	@echo "make counts  what a GPU will charge for, counted without one, beside the goals"
	@echo "make trl-parity  TRL's own trainers with and without fastrl's kernels"
	@echo "make bench   the benchmarks that this machine allows (BENCH=--full: more shapes)"
	@echo "make gpu     on an NVIDIA GPU: the tests there, then every benchmark, unattended"
	@echo "make hub     lay out the Kernel Hub package in kernels/build"
	@echo "make clean   remove .venv and caches"

$(VENV)/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) --editable '.[dev]'
	@touch $@

demo: $(VENV)/.runtime
	$(BIN)/fastrl demo $(DEMO)

# A process compiles anew what it imports where nothing may be written beside it.
test thorough: export PYTHONDONTWRITEBYTECODE =

# Where threads are asked for, those that wait leave the cores to the other workers. Each worker has
# a half of the tests and then takes from the other's, so that most fixtures are set up once.
test: export OMP_WAIT_POLICY ?= passive
test: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(PYTEST)
	$(BIN)/python -m tests.aot --quick --target sm_90 --target gfx942

# What `make test` leaves out. With PART=WORD, a part of each of its programs that the word draws.
thorough: export THOROUGH = 1
thorough: export PART ?=
thorough: export OMP_WAIT_POLICY ?= passive
thorough: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(PYTEST)
	$(BIN)/python -m tests.aot --triton all
	$(BIN)/python -m tests.ptx --selection
	$(BIN)/python -m tests.headroom
	$(BIN)/python -m tests.families
	$(BIN)/python -m tests.resolution
	$(BIN)/python -m tests.installs
	$(BIN)/python -m tests.versions
	$(BIN)/python -m tests.notebooks

# Ten minutes on two cores; HEADROOM= takes --light and --full.
headroom: $(VENV)/.dev
	$(BIN)/python -m tests.headroom $(HEADROOM)

resolve: $(VENV)/.dev
	$(BIN)/python -m tests.resolution

# VERSIONS= takes newest or lowest, and behind it pytest's arguments.
versions: $(VENV)/.dev
	$(BIN)/python -m tests.versions $(VERSIONS)

# Six minutes on two cores; NOTEBOOKS= takes names.
notebooks: $(VENV)/.dev
	$(BIN)/python -m tests.notebooks --write $(NOTEBOOKS)

faults: export FAULTS = all
faults: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile tests/faults $(PYTEST)

processes: export PROCESSES = 2,4
processes: $(VENV)/.dev
	$(BIN)/python -m pytest tests/processes $(PYTEST)

# SERVING='--vllm PYTHON' takes an environment that has vLLM, in place of two minutes and 4 GB.
serving: $(VENV)/.dev
	$(BIN)/python -m tests.serving $(SERVING)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.docs: $(VENV)/.runtime
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	$(PIP) --editable '.[docs]'
	@touch $@

# A broken link, a missing heading or an unknown name of the API is an error.
docs: $(VENV)/.docs
	$(BIN)/python docs/.api/trl_1x.py
	$(BIN)/python docs/.api/capabilities.py
	$(BIN)/python docs/.api/eras.py
	$(BIN)/python docs/.api/aliases.py
	$(BIN)/python docs/.api/notebooks.py
	$(BIN)/python docs/.api/tutorial.py
	$(BIN)/zensical build --clean --strict
	@echo "Open $(CURDIR)/site/index.html; its search needs no server."

aot: $(VENV)/.dev
	$(BIN)/python -m tests.aot --triton all

# Most of an hour on two cores; EMULATED= takes files and tests, or --selection.
emulated: $(VENV)/.dev
	$(BIN)/python -m tests.ptx $(EMULATED)

counts: $(VENV)/.dev
	$(BIN)/python -m tests.counts

gpu: $(VENV)/.dev
	$(BIN)/python -m benchmarks gpu
	$(BIN)/python -m benchmarks report

bench: $(VENV)/.dev
	$(BIN)/python -m pytest benchmarks --results $(BENCH)
	$(BIN)/python -m benchmarks report

trl-parity: $(VENV)/.dev
	$(BIN)/python -m pytest tests/trl_parity
	$(BIN)/python -m tests.trl_parity

hub: $(VENV)/.dev
	$(BIN)/python kernels/build_hub.py

clean:
	rm -rf $(VENV) site kernels/build .pytest_cache .ruff_cache .mypy_cache .hypothesis
