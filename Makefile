# Everything runs from here; `make help` lists it. Nothing is installed outside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
TEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo test unit check lint types build fault e2e fuzz bench fmt lock clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(VENV)/.ready: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.txt
	@touch $@

venv: $(VENV)/.ready ## a virtual environment with pinned, hash-checked packages

demo: venv ## three nodes on this machine with the rehearsal engine (DEMO_ARGS="--once")
	$(BIN)/python shardbox.py demo $(DEMO_ARGS)

test: check ## everything: lint, types, all tests

check: lint types ## lint, types, tests
	$(BIN)/pytest $(TEST_ARGS) tests

unit: venv ## only the quick tests of the pure parts
	$(BIN)/pytest $(TEST_ARGS) tests/unit

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy shardbox.py tests

fmt: venv ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

build: venv ## dist/shardbox, one executable for machines like this one
	PYTHONHASHSEED=0 $(BIN)/pyinstaller --noconfirm --log-level WARN --distpath dist --workpath build/pyinstaller build.spec
	@ls -l dist/shardbox

e2e: build ## the end-to-end tests against dist/shardbox
	SHARDBOX_EXE=dist/shardbox $(BIN)/pytest $(TEST_ARGS) tests/e2e

fault: venv ## every fault, against the rehearsal engine in network namespaces (root)
	$(BIN)/pytest $(TEST_ARGS) tests/fault

fuzz: venv ## hostile input and 10,000 half-open connections (FUZZ_SECONDS=60)
	PYTHONPATH=.:tests:tests/unit $(BIN)/python tests/fuzz/fuzz.py

bench: venv ## speed beside HAProxy (BENCH_PAIRS=7), start-up, plans; writes build/bench.json
	PYTHONPATH=. $(BIN)/python tests/bench.py

lock: venv ## pin the newest versions again, with hashes
	$(BIN)/pip install --quiet pip-tools
	$(BIN)/pip-compile -q --upgrade --generate-hashes --strip-extras --no-emit-index-url --no-emit-find-links --allow-unsafe -o requirements.txt requirements.in
	$(BIN)/pip-compile -q --upgrade --generate-hashes --strip-extras --no-emit-index-url --no-emit-find-links --allow-unsafe -o requirements-dev.txt requirements-dev.in

clean: ## remove what was built
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
