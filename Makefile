# Every target sets up the environment it needs: a fresh clone needs nothing but python3 and make.
PYTHON ?= python3
# For the GPU tests: the environment above has a CPU build of torch.
GPU_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DOCS := build/docs-environment
READY := $(VENV)/.ready

# Without bytecode each process that loads torch compiles it first, for some five seconds of a processor.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test rest slow dropin launchers kernels matrix gpu-test style lint format proto bench leaks stress fuzz mutate soak clean help simulate docs

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: $(READY)  ## three replica groups train, one is killed, one is stopped; about 2 minutes
	$(BIN)/python examples/demo.py

test: style  ## everything that CI checks: lint, format, types, tests
	$(BIN)/python -m tests.lanes

gpu-test:  ## the tests that need a GPU, with $(GPU_PYTHON), which has a CUDA build of torch (docs/gpu.md)
	PYTHONPATH=. $(GPU_PYTHON) -m pytest -o addopts=-ra -W ignore::pytest.PytestConfigWarning -m gpu tests/gpu

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(BIN)/mypy

format: $(READY)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(READY)  ## regenerate lighthouse/wire from proto/torchft.proto
	$(BIN)/python tools/generate_wire.py

bench: $(READY)  ## every benchmark, beside torchft 0.2.0 and its nightly in the same run
	$(BIN)/python -m benchmarks.run

simulate: $(READY)  ## a hundred thousand simulated jobs, and every broken core hunted; 17 minutes and more (docs/testing.md)
	$(BIN)/python -m tests.simulation --seeds 0:100000 --jobs 2
	$(BIN)/python -m tests.simulation --seeds 0:3000 --jobs 2 --mutants

rest: $(READY)  ## the rows of slow tables that `make test` leaves out, and the DiLoCo example
	$(BIN)/python -m pytest -m rest tests/integration tests/interop

slow: $(READY)  ## the tests that are too long for `make test`, but for those below
	$(BIN)/python -m pytest -m "slow and not gpu" --ignore tests/integration/test_no_leak.py \
		--ignore tests/interop/test_launchers.py \
		tests/integration tests/interop tests/chaos tests/stress tests/gpu tests/simulation

dropin: $(READY)  ## other projects' scripts, unchanged, with this package as torchft (docs/dropin.md); at most 20 minutes
	$(BIN)/python -m tests.dropin

launchers: $(READY)  ## the recipes of docs/launchers.md under Slurm, where that is installed, and Ray; about 3 minutes
	$(BIN)/python -m pytest -m slow -rs tests/interop/test_launchers.py

build/triton: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==3.9.0

kernels: $(READY) build/triton  ## the kernels of quantized collectives in Triton's interpreter, against the CPU's bits
	PYTHONPATH=build/triton $(BIN)/python -m pytest tests/unit/test_quantized_collectives.py

# Names of rows and of suites of docs/versions.md; all of them where none is given.
ROWS ?=
SUITES ?=

matrix: $(READY)  ## unit, conformance and failure tests on each version of torch, protobuf and Python (docs/versions.md)
	$(BIN)/python -m tools.matrix --rows $(ROWS) --suites $(SUITES)

docs: $(DOCS)/.ready  ## the documentation as a site, in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

leaks: $(READY)  ## a thousand reconfigurations of each process group, a hundred of Baby groups; about 2 minutes
	$(BIN)/python -m pytest -m slow tests/integration/test_no_leak.py

# Seconds, seconds between two faults, replica groups; KINDS and more (`--help`) by SOAK_ARGUMENTS.
SOAK_LENGTH ?= 3600
SOAK_INTERVAL ?= 10
SOAK_REPLICAS ?= 4
SOAK_OUT ?= soak_output
SOAK_ARGUMENTS ?=

soak: $(READY)  ## faults into a real job for SOAK_LENGTH seconds, after as long without; report in SOAK_OUT
	$(BIN)/python -m torchft_like.chaos soak --length $(SOAK_LENGTH) --interval $(SOAK_INTERVAL) \
		--replicas $(SOAK_REPLICAS) --out $(SOAK_OUT) $(SOAK_ARGUMENTS)

stress: $(READY)  ## 10,000 connections to each server that come and go, 5,000 that stay; about 3 minutes
	STRESS_CONNECTIONS=$(or $(CONNECTIONS),10000) STRESS_TRANSFERS=1000 $(BIN)/python -m pytest -s tests/stress

fuzz: $(READY)  ## each parser of foreign bytes with EXAMPLES=3000 inputs; about 2 minutes
	FUZZ_EXAMPLES=$(or $(EXAMPLES),3000) $(BIN)/python -m pytest --timeout 3600 -n 2 tests/stress/test_fuzz_*.py

mutate: $(READY)  ## MESSAGES=1000000 changed messages over all parsers of foreign bytes; about 2 minutes
	MUTATIONS=$(or $(MESSAGES),1000000) $(BIN)/python -m pytest -rP --timeout 3600 -n 2 tests/stress/test_fuzz_mutations.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

# Without torch: the pages are made from sources that nothing imports.
DOCS_EXTRA := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")

$(DOCS)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(PYTHON) -c '$(DOCS_EXTRA)' > $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --quiet --requirement $(DOCS)/requirements.txt
	touch $@

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) build ./*.egg-info .mypy_cache .ruff_cache .pytest_cache demo_output soak_output
