# One verb each. Every verb does all the set-up it needs in the local virtual environment .venv.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
BENCH_ARGS ?= pages --output benchmarks/results
PYTEST_ARGS ?=
FAULT_ARGS ?=
HUB_ARGS ?=
MATRIX_ARGS ?=
# Which CUDA kernels are built: AUTO (for the GPUs of this machine, none where there is no GPU), ON (for all architectures) or OFF. What others
# are given, a wheel and the layout for the hub, has all of them unless told otherwise.
wheel hub: CUDA ?= ON
CUDA ?= AUTO
# Targets in place of those, as in CMAKE_CUDA_ARCHITECTURES, such as "80-real;90a-real".
CUDA_ARCHS ?=
# Which families of them the GPU tests run, one after the other: auto is the best for each call, on Hopper sm90 almost always.
FAMILY ?= auto sm80
# Processes that run tests, of a thread each.
TEST_WORKERS ?= $(shell n=$$(nproc); echo $$((n < 16 ? n : 16)))
GPU_WORKERS ?= $(shell n=$$(nproc); echo $$((n < 10 ? n : 10)))

ifneq ($(shell command -v ccache 2>/dev/null),)
export CMAKE_CXX_COMPILER_LAUNCHER := ccache
export CMAKE_CUDA_COMPILER_LAUNCHER := ccache
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-all gpu lint format docs wheel matrix hub bench asan coverage faults build clean

help:  ## say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: $(VENV)/demo.ready build  ## train a small language model on real text, export it, compare with SDPA (TEXT=path for your own; DEMO_ARGS=--long)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/train_language_model.py $(if $(TEXT),--text "$(TEXT)") $(DEMO_ARGS)

test: $(VENV)/test.ready build  ## build, and run a quick set: two cases of most tests, without those that take long
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quick -n $(TEST_WORKERS) $(PYTEST_ARGS)

test-all: $(VENV)/test.ready build  ## build, and run the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) $(PYTEST_ARGS)

gpu: $(VENV)/test.ready build  ## the tests marked gpu, side by side; FAMILY=sm80 runs one family of kernels
	for family in $(FAMILY); do \
	  DMATTN_FAMILY=$$family OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m gpu -n $(GPU_WORKERS) $(PYTEST_ARGS); \
	done

lint: $(VENV)/lint.ready $(VENV)/test.ready  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files 'cpp/*.h' 'cpp/*.cpp' 'cpp/*.cu' 'cpp/*.cuh' 'examples/*.cpp')
	$(BIN)/mypy

format: $(VENV)/lint.ready  ## rewrite sources in the one format
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'cpp/*.h' 'cpp/*.cpp' 'cpp/*.cu' 'cpp/*.cuh' 'examples/*.cpp')

docs: $(VENV)/docs.ready build  ## the documentation as a site in build/site; a warning is an error
	PYTHONPATH=benchmarks $(BIN)/python docs/draw.py
	PYTHONPATH=benchmarks $(BIN)/python docs/pictures.py
	$(BIN)/sphinx-build -q -E -W --keep-going -d build/doctrees docs build/site
	@echo "build/site/index.html"

wheel: $(VENV)/wheel.ready  ## one wheel in dist/ with CUDA kernels of all architectures, under the oldest system's tag that is true, and audited (CUDA=OFF: without)
	@$(BIN)/cmake -DDMATTN_CUDA=$(CUDA) "-DDMATTN_CUDA_ARCHS=$(CUDA_ARCHS)" -P cmake/cuda_choice.cmake
	rm -rf build/wheel
	$(BIN)/pip wheel -q --no-build-isolation --no-deps --wheel-dir build/wheel -C cmake.define.DMATTN_CUDA=$(CUDA) -C "cmake.define.DMATTN_CUDA_ARCHS=$(CUDA_ARCHS)" .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude libtorch.so --wheel-dir dist build/wheel/*.whl
	$(BIN)/abi3audit --strict --summary build/wheel/*.whl
	@ls -1 dist/*.whl

matrix: $(VENV)/pip.ready  ## install the wheel in dist/ with Python 3.10 to 3.14 and several torches, and test it there (docs/install.md)
	PYTHONPATH=benchmarks $(BIN)/python tools/wheel_matrix.py $(MATRIX_ARGS)

hub: build  ## lay the build out for the Hugging Face kernels hub in build/hub, and check it (docs/install.md)
	$(BIN)/python cmake/hub/layout.py build/hub $(HUB_ARGS)

bench: $(VENV)/test.ready build  ## time what the pages show, with its peers (BENCH_ARGS="causal --quick": other workloads)
	PYTHONPATH=benchmarks $(BIN)/python -m dmattn_bench run $(BENCH_ARGS)

asan: $(VENV)/test.ready  ## the suite on a build of the CPU ops with AddressSanitizer and UndefinedBehaviorSanitizer
	tests/sanitize.sh $(PYTEST_ARGS)

coverage: export COVERAGE_FILE = $(CURDIR)/build/coverage/.coverage
coverage: $(VENV)/test.ready build  ## the lines of python/dmattn that the tests run
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m pytest -n $$(nproc) $(PYTEST_ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

faults: $(VENV)/test.ready  ## plant mutations in copies of the sources and see which test finds each (FAULT_ARGS="--area python --count 20")
	PYTHONPATH=benchmarks $(BIN)/python tools/planted_faults.py $(FAULT_ARGS)

build: $(VENV)/build.ready  ## compile and install into .venv, with CUDA kernels for the GPUs of this machine (CUDA=ON: all architectures)
	@$(BIN)/cmake -DDMATTN_CUDA=$(CUDA) "-DDMATTN_CUDA_ARCHS=$(CUDA_ARCHS)" -P cmake/cuda_choice.cmake
	$(BIN)/pip install -q --no-build-isolation --no-deps --force-reinstall -C cmake.define.DMATTN_CUDA=$(CUDA) -C "cmake.define.DMATTN_CUDA_ARCHS=$(CUDA_ARCHS)" .

clean:  ## remove what was built (not .venv)
	rm -rf build dist

$(VENV)/pip.ready:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "dmattn needs Python 3.10 or newer: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q 'pip>=25.1'
	@touch $@

$(VENV)/%.ready: $(VENV)/pip.ready pyproject.toml
	$(BIN)/pip install --group build --group $* | sed '/^Requirement already/d'
	@touch $@
