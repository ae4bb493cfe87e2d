# The five commands that people use. PYTHON=python3.12 make setup takes another Python.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: setup test check docs release

setup:  ## an environment with everything that the others need
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -e ".[test,docs]" pre-commit

test:  ## the fast tier; make test T="-m ''" runs all, T=tests/ops a part
	$(BIN)/python -m pytest -n 2 -q $(T)

check:  ## lint, format, types, spelling
	PATH="$(CURDIR)/$(BIN):$$PATH" pre-commit run --all-files

docs:  ## the site, in build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release:  ## wheel and sdist, each installed elsewhere and used
	PYTHON=$(BIN)/python .ci/release
