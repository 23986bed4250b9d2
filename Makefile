# Each target sets up what it needs in a virtual environment of its own; nothing outside this folder is touched.
PYTHON ?= python3
VENV ?= .venv
# What to install torch from, for example TORCH=torch==2.13.0. Empty: tests that need torch are skipped.
TORCH ?=
# Options of `python -m venv` and of `pip install`, for machines with packages of their own or without a network:
# VENV_ARGS=--system-site-packages, PIP_ARGS="--no-index --find-links DIR".
VENV_ARGS ?=
PIP_ARGS ?=

# Which tests to run; all of them unless some are named. And how many at a time.
TESTS ?=
JOBS ?= 3

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
PIN := $(BIN)/uv pip compile --quiet --upgrade --generate-hashes --python-version 3.12 --custom-compile-command 'make lock'
# A virtual environment sees the system's packages, but not those of another one that it was made with.
OUTER_PACKAGES = $(PYTHON) -c 'import site, sys; print("\n".join(site.getsitepackages() if sys.prefix != sys.base_prefix else []))' \
	> "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer_packages.pth"
.DEFAULT_GOAL := help

.PHONY: help demo test lint docs chaos fuzz bench gpu wheel release lock secrets clean

help:  ## Show this list.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/ -/'

demo: $(VENV)/.demo  ## Serve the embedded digits, train a classifier on them through the client, show the result.
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev  ## Run the tests, several at a time: they wait for processes more than they work.
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TESTS)

lint: $(VENV)/.dev  ## Check style, types and import contracts.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for platform in darwin win32; do \
		$(BIN)/mypy --platform $$platform --no-warn-unreachable --cache-dir .mypy_cache/$$platform client shared || exit 1; \
	done
	$(BIN)/lint-imports

docs: $(VENV)/.docs  ## Make the documentation's site in build/docs; links that lead nowhere are errors (LINKS=1 tries those to other sites too).
	$(BIN)/python -m sphinx --builder html --fresh-env --fail-on-warning --keep-going --quiet docs build/docs
	$(if $(LINKS),$(BIN)/python -m sphinx --builder linkcheck --quiet docs build/links)

chaos: $(VENV)/.dev  ## Break servers, networks and clients for a minute while they load (CHAOS="--seed 7 --minutes 10").
	$(BIN)/python -m tests.chaos $(CHAOS)

fuzz: $(VENV)/.fuzz  ## Try hostile frames, states and requests for some minutes (FUZZ="frames --executions 200000 --seed 7").
	$(BIN)/python -m tests.fuzz $(FUZZ)

bench: $(VENV)/.dev  ## Measure against plain sockets and torch's local DataLoader (TORCH=torch to have it). See benchmarks/README.md for more.
	$(BIN)/python -m benchmarks

gpu: $(VENV)/.gpu  ## Test and measure the path to a GPU in ten minutes at most; without a GPU, on a CPU fallback (GPU="--quick --output DIR").
	$(BIN)/python -m benchmarks.gpu --tests $(GPU)

wheel: $(VENV)/.dev  ## Build the wheel, and try it in clean environments.
	$(BIN)/python .ci/check_wheel.py

release: $(VENV)/.release  ## Check the tree, test, build, sign: VERSION=0.1.0 (RELEASE="--key ~/.ssh/id_ed25519"). Publishes nothing.
	$(BIN)/python .ci/release.py $(VERSION) $(RELEASE)

lock: $(VENV)/.lock  ## Choose and pin anew, with hashes, the packages that the container images have.
	printf 'hatchling\nhatch-fancy-pypi-readme\n' | $(PIN) --output-file docker/requirements/build.txt -
	$(PIN) --extra server --extra oidc --output-file docker/requirements/server.txt pyproject.toml
	$(PIN) --extra demo --output-file docker/requirements/trainer.txt pyproject.toml

secrets:  ## Make the tokens and the password that docker-compose.yml wants, in docker/secrets.
	docker/make-secrets.sh

clean:  ## Remove what the other targets made.
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV_ARGS) $(VENV)
	$(if $(findstring --system-site-packages,$(VENV_ARGS)),$(OUTER_PACKAGES))

# The pip of Python 3.11 and 3.12 does not know dependency groups.
$(VENV)/.pip: | $(VENV)/bin/python
	$(PIP) 'pip>=25.1'
	touch $@

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable '.[server,demo]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.pip
	$(PIP) $(TORCH) --editable . --group dev
	touch $@ $(VENV)/.demo

$(VENV)/.gpu: pyproject.toml | $(VENV)/.pip
	$(PIP) $(TORCH) --editable . --group gpu || { $(BIN)/python -m benchmarks.gpu.requirements $(PIP_ARGS); exit 1; }
	touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.pip
	$(PIP) --editable . --group docs
	touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	$(PIP) --editable . --group fuzz
	touch $@

$(VENV)/.release: pyproject.toml | $(VENV)/.pip
	$(PIP) --group release
	touch $@

$(VENV)/.lock: | $(VENV)/bin/python
	$(PIP) uv
	touch $@
