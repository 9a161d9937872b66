# make docs    the site, into build/docs: warnings, dead links and orphaned pages are errors
# make demo    a tour on embedded servers, Python only (KEEP=1 leaves it running; BROKER=kafka|rabbitmq)
# make check   format, lint, types, import contracts, dependencies, lock, unit tests: before every commit
# make test    every test, on real Postgres, Kafka and RabbitMQ
# make leaks   every test, and the garbage collector after each: slower, it fails for what a test leaves open
# make faults  faults of every kind against real processes, 60 runs (RUNS=, SEED=, QUICK=1 change that)
# make soak    half of what it can take and random faults for 30 minutes: nothing may grow (MINUTES=, BROKER=, SEED=)
# make planted each of the defects planted into its processes is found by the fault suite
# make nightly random histories: 5,000 of the consumer engine; 2,000 of relays, and of members (HISTORIES=, SIMULATIONS=, SEED=)
# make fuzz    libFuzzer on what strangers can send or type, a minute for each target (SECONDS=); keeps what it finds
# make lock    refresh the locks after a change of dependencies (UPGRADE=1 takes newer versions)

PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
STAMP := .venv/.installed
CODE := $(wildcard src outbox_relay consumers tests benchmarks examples compose docs)
COMPILE := uv pip compile -q --universal --generate-hashes --python-version 3.11 --no-header \
	--no-emit-index-url --no-emit-find-links
COMPILE_DEV := $(COMPILE) --all-extras --group dev pyproject.toml
COMPILE_BOOTSTRAP := $(COMPILE) -c requirements/dev.txt requirements/bootstrap.in
COMPILE_BUILD := $(COMPILE) -c requirements/dev.txt requirements/build.in
COMPILE_FUZZ := $(COMPILE) -c requirements/dev.txt requirements/fuzz.in
COMPILE_RUNTIME := $(COMPILE) -c requirements/dev.txt --extra all pyproject.toml

.DELETE_ON_ERROR:
.PHONY: install format check static lock-check unit lock services test leaks faults soak planted nightly fuzz docs demo bench clean

install: $(STAMP)

$(STAMP): requirements/bootstrap.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "towpath needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
	$(BIN)/uv pip install -q --python $(BIN)/python --require-hashes --compile-bytecode -r requirements/dev.txt
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

format: install
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

check: static lock-check unit

static: install
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/deptry .

# The existing locks are the preference, so only a change of pyproject.toml makes a difference.
lock-check: install
	@set -e; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; \
	cp requirements/dev.txt requirements/bootstrap.txt requirements/fuzz.txt "$$dir"; \
	$(BIN)/$(COMPILE_DEV) -o "$$dir/dev.txt"; \
	$(BIN)/$(COMPILE_BOOTSTRAP) -o "$$dir/bootstrap.txt"; \
	$(BIN)/$(COMPILE_BUILD) -o "$$dir/build.txt"; \
	$(BIN)/$(COMPILE_FUZZ) -o "$$dir/fuzz.txt"; \
	$(BIN)/$(COMPILE_RUNTIME) -o "$$dir/runtime.txt"; \
	for lock in dev bootstrap build fuzz runtime; do \
		cmp -s requirements/$$lock.txt "$$dir/$$lock.txt" \
			|| { echo "requirements/$$lock.txt is stale, run: make lock" >&2; exit 1; }; \
	done

unit: install
	$(BIN)/python -m pytest -q -m "not services and not slow" $(wildcard tests/unit tests/property tests/fuzz tests/faults tests/docs)

lock:
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
	$(BIN)/$(COMPILE_DEV) $(if $(UPGRADE),--upgrade) -o requirements/dev.txt
	$(BIN)/$(COMPILE_BOOTSTRAP) -o requirements/bootstrap.txt
	$(BIN)/$(COMPILE_BUILD) -o requirements/build.txt
	$(BIN)/$(COMPILE_FUZZ) -o requirements/fuzz.txt
	$(BIN)/$(COMPILE_RUNTIME) -o requirements/runtime.txt

services: install
	$(BIN)/python -m towpath.testing.services install

# Two processes, each with servers of its own: fixtures start one when a test first needs it, and stop it.
test: services
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=20

leaks: services
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		-p tests.fixtures.leaks -W error::pytest.PytestUnraisableExceptionWarning

nightly: services
	TOWPATH_TEST_HISTORIES=$(or $(HISTORIES),5000) TOWPATH_TEST_SEED=$(or $(SEED),1000000) \
		TOWPATH_TEST_SIMULATIONS=$(or $(SIMULATIONS),2000) \
		$(BIN)/python -m pytest tests/property/test_work_protocol.py tests/simulation
	TOWPATH_TEST_SCALE=10 $(BIN)/python -m pytest tests/integration/test_delayed_events.py

faults: services
	$(BIN)/python -m tests.faults $(if $(QUICK),--quick --runs 3,--runs $(or $(RUNS),60)) --seed $(or $(SEED),1)

soak: services
	$(BIN)/python -m tests.faults.soak --minutes $(or $(MINUTES),30) --broker $(or $(BROKER),kafka) --seed $(or $(SEED),1)

planted: services
	$(BIN)/python -m tests.faults.planted

fuzz: install
	$(BIN)/uv pip install -q --python $(BIN)/python --require-hashes -r requirements/fuzz.txt
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60)

docs: install
	$(BIN)/python -m sphinx -q -n -W --keep-going -d build/doctrees docs build/docs

demo: install $(if $(filter kafka rabbitmq,$(BROKER)),services)
	KEEP=$(KEEP) BROKER=$(BROKER) $(BIN)/python -m examples.demo

bench: install
	$(BIN)/python -m benchmarks relay --quick
	$(BIN)/python -m benchmarks consumer --quick
	$(BIN)/python -m benchmarks e2e --quick

clean:
	rm -rf .venv dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
