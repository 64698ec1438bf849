# The few recipes that people and CI both run.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt

.PHONY: demo test check venv format bench bench-loader bench-transfer bench-adapters bench-peers clean

demo: $(VENV)/.demo ## make a small model and three adapters, serve them, ask them
	@$(BIN)/loadstone demo $(ARGS)

test: $(VENV)/.dev ## the whole test suite; ARGS="tests/format -k header" for a part
	@$(BIN)/python -m pytest --cov --cov-report=term $(ARGS)

check: $(VENV)/.dev ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(VENV)/.dev ## everything for development

bench: $(VENV)/.dev ## cold start of the demo model (run make demo first), or of ARGS=LOCATION
	@$(BIN)/loadstone bench cold-start $(or $(ARGS),$(HOME)/.cache/loadstone-demo/demo-model/base)

bench-loader bench-transfer bench-adapters: bench-%: $(VENV)/.dev
	@$(BIN)/loadstone bench $* $(ARGS)

bench-peers: $(VENV)/.dev ## install the other loaders that benchmarks compare with
	$(INSTALL) --editable '.[bench-peers]'

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@sh scripts/make-venv.sh $(PYTHON) $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing loadstone and what the demo needs into $(VENV) (about 1.5 GB, once)"
	@$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing loadstone and what development needs into $(VENV) (about 2 GB, once)"
	@$(INSTALL) --editable '.[bench,dev]'
	@touch $@ $(VENV)/.demo
