# make serve    serve the default model on this machine's CPU     (MODEL=org/name or a directory: another one;
#               CONFIG=configs/x.yaml: a Serve config file; on a node with GPUs: GPU=1 CONFIG=configs/one-gpu.yaml)
# make install  only the environment, in .venv                     (GPU=1: the one for GPUs, x86_64 and Python 3.11)
# make test     run the tests                                      (in the CPU environment)
# make check    format, lint, types, layers
# make lock     renew requirements/*.txt
# make notebooks  run the notebooks and store their outputs
# make audit    known vulnerabilities in what is locked (asks pypi.org)
# make clean    remove the environment and caches

PYTHON ?= python3
MODEL ?=
CONFIG ?=
# 1: the packages of a node with NVIDIA GPUs (requirements/gpu.txt) instead of the CPU's.
GPU ?=
# PyTorch's CPU index. PyPI alone has no CPU build of torch: https://download.pytorch.org/whl/cpu has.
TORCH_INDEX ?=
# Arguments for pytest, as in `make test PYTEST="tests/unit -x"`.
PYTEST ?=

VENV := .venv
BIN := $(VENV)/bin
# With `.venv` active, as Ray's workers and the model's conversion start `python` of their own.
RUN := PATH="$(CURDIR)/$(BIN):$$PATH"
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
# A stamp for each kind: both have files of their own in vllm/ and torch/, so one never goes on top of the other.
CPU_STAMP := $(VENV)/.installed-cpu.stamp
GPU_STAMP := $(VENV)/.installed-gpu.stamp
ifeq ($(GPU),)
INSTALLED := $(CPU_STAMP)
else ifeq ($(GPU),1)
INSTALLED := $(GPU_STAMP)
else
$(error GPU is '$(GPU)': 1, or left out, is wanted)
endif

.PHONY: install serve test check notebooks lock audit clean

install: $(INSTALLED)

# --no-deps: the lock is complete, and a resolver would add the CUDA builds that it leaves out.
# --no-build-isolation: build with the lock's setuptools instead of downloading another one.
$(CPU_STAMP): requirements/cpu.txt requirements/torch.txt pyproject.toml
	@if [ -e $(GPU_STAMP) ]; then echo "$(VENV) is for GPUs: add GPU=1, or 'make clean' first" >&2; exit 1; fi
	@echo "Installing into $(VENV) (the first time about 1 GB, some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/torch.txt
	@$(PIP) install --no-deps --require-hashes -r requirements/cpu.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# The lock has one file a package, so pip would refuse any other machine only package by package.
$(GPU_STAMP): requirements/gpu.txt pyproject.toml
	@if [ -e $(CPU_STAMP) ]; then echo "$(VENV) is for the CPU: leave GPU=1 out, or 'make clean' first" >&2; exit 1; fi
	@$(PYTHON) -c 'import platform, sys; found = (platform.machine(), *sys.version_info[:2]); found == ("x86_64", 3, 11) \
	  or sys.exit(f"requirements/gpu.txt is for x86_64 with Python 3.11, found {found}: PYTHON=python3.11 names another")'
	@echo "Installing into $(VENV) for GPUs (the first time several GB, many minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --no-deps --require-hashes -r requirements/gpu.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# RAY_preload_python_modules: of the Ray that `serve run` starts; with a file nothing of ours runs before that Ray does.
serve: install
ifneq ($(CONFIG),)
	@$(RUN) RAY_preload_python_modules=serve_app.engine.spare serve run $(CONFIG)
else ifeq ($(GPU),1)
	@echo "GPU=1 serves a file, as in: make serve GPU=1 CONFIG=configs/one-gpu.yaml" >&2; exit 1
else
	@$(RUN) serve-app prepare $(MODEL)
	@$(RUN) serve run serve_app:app $(if $(MODEL),model=$(MODEL))
endif

test: install
	@$(RUN) pytest $(PYTEST)

check: install
	@$(RUN) ruff format --check --quiet .
	@$(RUN) ruff check --quiet .
	@$(RUN) mypy --no-error-summary serve_app benchmarks
	@$(RUN) lint-imports --no-cache --no-logo

notebooks: install
	@$(RUN) python tools/notebooks.py

lock:
	@$(PYTHON) -m venv $(VENV)-lock
	@$(VENV)-lock/bin/python -m pip -qq --disable-pip-version-check install uv
	@$(VENV)-lock/bin/python tools/lock.py
	@rm -rf $(VENV)-lock

# --strict: a package that the service does not know is a failure, not a pass.
audit:
	@$(PYTHON) -m venv $(VENV)-audit
	@$(VENV)-audit/bin/python -m pip -qq --disable-pip-version-check install pip-audit
	@for lock in requirements/*.txt; do \
	  $(VENV)-audit/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off -r $$lock || exit 1; \
	done
	@rm -rf $(VENV)-audit

clean:
	@rm -rf $(VENV) $(VENV)-lock $(VENV)-audit .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info build
	@find serve_app tests -name __pycache__ -type d -exec rm -rf {} +
