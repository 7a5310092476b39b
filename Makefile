# Everything runs from here; `make help` lists it. Nothing is installed outside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
TEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo test unit check lint types build release build-check fault soak large e2e fuzz bench bench-plan bench-copy fmt lock clean

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

lint: venv ## rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv ## mypy, strict
	$(BIN)/mypy shardbox.py tests tools

fmt: venv ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

build: ## dist/shardbox, one executable for machines like this one, and its SHA256SUMS
	@PYTHON="$(PYTHON)" tools/build-deps
	@$(MAKE) --no-print-directory venv
	@rm -rf build/folder && mkdir -p build && date +%s > build/started
	PYTHONHASHSEED=0 PYINSTALLER_ZLIB_COMPRESSION_LEVEL=0 $(BIN)/python -m PyInstaller --noconfirm --log-level WARN --distpath build/folder --workpath build/pyinstaller build.spec
	patchelf --set-rpath '$$ORIGIN/_internal' build/folder/shardbox/shardbox
	gcc -std=gnu11 -O2 -Wall -Wextra -Werror -static -s -Wl,--build-id=none -o build/launcher tools/launcher.c -lzstd
	$(BIN)/python tools/pack.py build/launcher build/folder/shardbox dist/shardbox
	@echo "built in $$(( $$(date +%s) - $$(cat build/started) )) s"

release: venv ## dist/shardbox for old systems, tried in some, and build/release.json (root, debootstrap; at first 15 minutes)
	PYTHONPATH=tools $(BIN)/python tools/release.py

build-check: venv ## build the last commit twice, in different folders: the same bytes?
	@PYTHON="$(PYTHON)" BIN="$(CURDIR)/$(BIN)" tools/build-check

e2e: build ## the end-to-end tests against dist/shardbox
	SHARDBOX_EXE=$(CURDIR)/dist/shardbox $(BIN)/pytest $(TEST_ARGS) tests/e2e tests/integration/test_cluster.py tests/fault

fault: venv ## every fault on a ring of three with clients, FAULT_REPEAT times (2); a table, and build/fault.json (root)
	FAULT_REPEAT=$(or $(FAULT_REPEAT),2) $(BIN)/pytest -q $(TEST_ARGS) tests/fault

soak: venv ## random faults for SOAK_S seconds (600) with clients: nothing may be lost, or leak (root; SOAK_SEED=)
	PYTHONPATH=.:tests:tests/fault $(BIN)/python tests/fault/soak.py

large: venv ## copies and sticks with files of more than 4 GiB (root; three minutes, 10 GB of disk)
	SHARDBOX_LARGE=1 $(BIN)/pytest -q $(TEST_ARGS) -m large tests/integration

fuzz: venv ## hostile input and 10,000 half-open connections (FUZZ_SECONDS=60)
	PYTHONPATH=.:tests:tests/unit $(BIN)/python tests/fuzz/fuzz.py

bench: EXE ?= $(wildcard dist/shardbox)
bench: venv ## measurements of speed and memory, of dist/shardbox where it has been built
	PYTHONPATH=. SHARDBOX_EXE="$(EXE)" $(BIN)/python tests/bench.py

bench-plan: venv ## how long plans take; with SHARDBOX_PRIMA and SHARDBOX_MODEL, what they predict against real engines
	PYTHONPATH=. $(BIN)/python tests/bench_plan.py

bench-copy: venv ## copies beside scp and rsync, to 2 and 8 boxes, and beside a ring that answers (root)
	PYTHONPATH=.:tests:tests/integration $(BIN)/python tests/bench_copy.py

lock: venv ## pin the newest versions again, with hashes
	$(BIN)/pip install --quiet pip-tools
	$(BIN)/pip-compile -q --upgrade --generate-hashes --strip-extras --no-emit-index-url --no-emit-find-links --allow-unsafe -o requirements.txt requirements.in
	$(BIN)/pip-compile -q --upgrade --generate-hashes --strip-extras --no-emit-index-url --no-emit-find-links --allow-unsafe -o requirements-dev.txt requirements-dev.in

clean: ## remove what was built
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
