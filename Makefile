# make serve    serve the default model on this machine's CPU     (MODEL=org/name or a directory: another one)
# make test     run the tests                                      (CONFIG=configs/x.yaml: a Serve config file)
# make check    format, lint, types, layers
# make lock     renew requirements/*.txt
# make notebooks  run the notebooks and store their outputs
# make audit    known vulnerabilities in what is locked (asks pypi.org)
# make clean    remove the environment and caches

PYTHON ?= python3
MODEL ?=
CONFIG ?=
# PyTorch's CPU index, where pip does not find a CPU build of torch by itself.
TORCH_INDEX ?=
# Arguments for pytest, as in `make test PYTEST="tests/unit -x"`.
PYTEST ?=

VENV := .venv
BIN := $(VENV)/bin
# With `.venv` active, as Ray's workers and the model's conversion start `python` of their own.
RUN := PATH="$(CURDIR)/$(BIN):$$PATH"
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
INSTALLED := $(VENV)/.installed.stamp

.PHONY: install serve test check notebooks lock audit clean

install: $(INSTALLED)

# --no-deps: the lock is complete, and a resolver would add the CUDA builds that it leaves out.
# --no-build-isolation: build with the lock's setuptools instead of downloading another one.
$(INSTALLED): requirements/cpu.txt requirements/torch.txt pyproject.toml
	@echo "Installing into $(VENV) (the first time about 1 GB, some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/torch.txt
	@$(PIP) install --no-deps --require-hashes -r requirements/cpu.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

serve: install
ifeq ($(CONFIG),)
	@$(RUN) serve-app prepare $(MODEL)
	@$(RUN) serve run serve_app:app $(if $(MODEL),model=$(MODEL))
else
	@$(RUN) serve run $(CONFIG)
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
