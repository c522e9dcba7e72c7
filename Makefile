# The course's commands; `make` alone lists them.
#
# Where they install and run, the first that applies:
#   make lab PYTHON=...      that interpreter, if it belongs to a virtual or conda environment;
#                            otherwise .venv is made with it
#   an active conda environment, unless it is base
#   .venv, made with the first Python on the PATH that is new enough

PYTHON ?=
NOTEBOOKS ?=
LAB_ARGS ?=
TEST_ARGS ?= -n logical --maxprocesses 4 --dist loadfile
export COURSE_PYTHON := $(PYTHON)

candidates := $(if $(PYTHON),"$(PYTHON)",python3 python python3.14 python3.13 python3.12 python3.11 python3.10)
new_enough := import sys; sys.exit(sys.version_info < (3, 10))

# Sets $$python to the interpreter of the environment, which utils/install.py completes first.
define setup
found=; \
for candidate in $(candidates); do \
    if "$$candidate" -c "$(new_enough)" 2>/dev/null; then found=$$candidate; break; fi; \
done; \
if [ -z "$$found" ]; then \
    echo "The course needs Python 3.10 or newer, and this is what was found:" >&2; \
    for candidate in $(candidates); do \
        version=$$("$$candidate" --version 2>&1) || version="not there, or it does not start"; \
        echo "    $$candidate: $$version" >&2; \
    done; \
    echo "Install a newer Python (package manager or python.org), or name one: make lab PYTHON=/path/to/python3" >&2; \
    exit 1; \
fi; \
python=$$("$$found" -I utils/install.py) || exit 1
endef

.DEFAULT_GOAL := help
.PHONY: help setup lab test test-environment run bench clean clean-all

help: ## list these targets
	@echo "make lab is the place to start. All targets:"
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
	    printf '  %-18s %s\n' "$$name" "$$text"; done
	@echo
	@echo "They install into PYTHON=... or the active conda environment (not base), else into .venv."

setup: ## install what the course needs (the other targets do it by themselves)
	@$(setup); echo "ready: $$python"

lab: ## open the course in JupyterLab (LAB_ARGS=--no-browser prints the address only)
	@$(setup); \
	if [ "$$(id -u)" = 0 ]; then root=--allow-root; fi; \
	exec "$$python" -m jupyterlab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir="$$PWD" \
	    --LabApp.default_url=/lab/tree/chapters $$root $(LAB_ARGS)

test: ## lint, unit tests, and every notebook run and compared with its saved outputs
	@$(setup); \
	"$$python" -m ruff check && "$$python" -m ruff format --check && \
	"$$python" -m pytest $(TEST_ARGS)

test-environment: ## install environment.yml's packages in a fresh environment (network, 7 GB, minutes)
	@$(setup); "$$python" -m pytest tests/test_environment.py -m environment

run: ## execute the chapters and save their outputs (NOTEBOOKS="chapters/03_allreduce.ipynb ...")
	@$(setup); "$$python" -m utils.notebooks run $(NOTEBOOKS)

bench: ## run the benchmarks, which print tables
	@$(setup); "$$python" tests/benchmarks/run.py

clean: ## remove caches and built files (the environment stays)
	rm -rf build .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune \
	    -exec rm -rf {} +

clean-all: clean ## also remove .venv
	rm -rf .venv
