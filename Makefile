# What people run. The virtual environment is made on first use, and updated when the lock file changes.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
ARGS ?=
JOBS ?= 3
PACKAGES := quire gateway scheduler gpu_worker shared
INSTALLED := $(VENV)/.installed
# What is imported gets compiled then: compiling all of it now would take longer than the downloads.
PIP := $(BIN)/python -m pip install --quiet --no-compile

.PHONY: serve test chaos test-clients test-compose test-deploy fuzz lint format bench lock clean

serve: $(INSTALLED)  ## serve the embedded model, or: make serve ARGS="org/name --port 9000"
	$(BIN)/quire serve $(ARGS)

test: $(INSTALLED)
	$(BIN)/pytest -n $(JOBS) --dist loadfile tests $(ARGS)

chaos: $(INSTALLED)  ## roles killed and frozen at every token: the short tests of tests/chaos and the long ones
	$(BIN)/pytest -n $(JOBS) -m "long or not long" tests/chaos $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy $(PACKAGES) tests

bench: $(INSTALLED)  ## what needs no GPU: scheduler core, scheduler over sockets, gateway
	$(BIN)/python -m benchmarks.scheduler_core
	$(BIN)/python -m benchmarks.scheduler_sockets
	$(BIN)/python -m benchmarks.gateway_relay

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# torch comes first and alone, with whatever it needs on this machine (CUDA libraries and its own triton, or neither).
# The lock file is complete, so nothing else is resolved; triton is added only where torch brought none.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --no-deps -r requirements.lock
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.9.0
	$(PIP) --no-deps -e .
	touch $@

test-compose: $(INSTALLED)  ## the compose stack with real containers: needs docker
	PYTHON=$(BIN)/python tests/compose/run.sh

CLIENTS := $(VENV)-clients
NPM := $(if $(and $(shell command -v node),$(shell command -v npm)),$(CLIENTS)/npm/.installed)
test-clients: $(INSTALLED) $(CLIENTS)/.installed $(NPM)  ## real clients (PyPI, npm) against the real model: npm's only where it is
	$(BIN)/python -m tests.clients.run $(CLIENTS)

$(CLIENTS)/npm/.installed: tests/clients/package.json tests/clients/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)
	cd $(@D) && npm ci --silent
	touch $@

FUZZ := $(VENV)-fuzz
fuzz: $(INSTALLED) $(FUZZ)/.installed  ## schemathesis and 20,000 broken bodies against a gateway over a stub worker
	$(BIN)/python -m benchmarks.http_fuzz --schemathesis $(FUZZ)/bin/st $(ARGS)

DEPLOY := $(VENV)-deploy
test-deploy: $(DEPLOY)/.installed  ## checkov over docker/ and k8s/, in a virtual environment of its own: needs kubectl
	$(DEPLOY)/bin/python tests/deploy/hardening.py

# Virtual environments of their own, for what pins other versions than we do: .venv-deploy, .venv-clients, .venv-fuzz.
$(VENV)-%/.installed: tests/%/requirements.lock
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile --no-deps -r $<
	touch $@

lock:  ## write the lock file from what is installed now
	{ echo '# Exact versions of everything but torch and triton (see the Makefile). Made by: make lock'; \
	  $(BIN)/python -m pip freeze --exclude-editable --exclude torch --exclude triton --exclude quire; } > requirements.lock
	$(BIN)/python docker/split_lock.py

clean:
	rm -rf $(VENV) $(DEPLOY) $(CLIENTS) $(FUZZ) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
