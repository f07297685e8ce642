# Each target works from a bare checkout: it first makes .venv if it is missing or older than its inputs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-rules test-faults bench check venv format clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,hf]'
	@touch $@

# A small GPT on the standard library's own source, on two ranks; then its first 20 steps on one rank.
DEMO := examples/gpt/train.py --layers 4 --width 128 --heads 4 --context 128 --batch 16 --steps 400 --lr 2e-3
demo: $(STAMP)
	$(BIN)/monoflow run -n 2 $(DEMO) --out runs/demo --losses runs/demo/two-ranks.txt
	$(BIN)/monoflow run -n 1 $(DEMO) --stop-after 20 --no-sample --compare runs/demo/two-ranks.txt

test: check
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# Every rule on every sample of torch's own, in minutes; `make test` proves a slice of it.
test-rules: $(STAMP)
	$(BIN)/python -m tests.rules

# Ranks that are killed, stopped and starved while they train, in under 10 minutes; `make test` does a slice of it.
test-faults: $(STAMP)
	timeout 660 $(BIN)/python -m tests.faults

# Every bench with short settings and one table, in under 30 minutes on two cores that do nothing else.
bench: $(STAMP)
	$(BIN)/python bench/all.py --out runs/bench.md

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/null/test_imports.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv runs build *.egg-info
