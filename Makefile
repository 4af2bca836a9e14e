# make report   every notebook headless on the embedded model; prints the path of the offline HTML report
# make test     the quick suite                make test-all  everything: oracle, long cases, browser, C++ twin
# make lab      JupyterLab on the notebooks    make bench     the measured ratios      make check  ruff and mypy
#
# Each target makes the virtual environment and installs what it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint requirements.lock
PYTEST := $(BIN)/python -m pytest --dist worksteal
JOBS ?= 2
OUT ?= build/report

.PHONY: report lab test test-all test-plain test-twin real-mslite bench check clean

report: $(VENV)/.installed
	$(BIN)/qwen-npu report --out $(OUT) --jobs $(JOBS)

lab: $(VENV)/.installed
	$(BIN)/qwen-npu lab

test: $(VENV)/.installed
	$(PYTEST) -n $(JOBS) -m "not full and not ui and not npu" --ignore tests/oracle

# Long tests kill processes and drive a browser against the clock: a busy machine gets one second try, and it is told.
test-all: $(VENV)/.oracle check test-twin test-plain
	$(BIN)/python -m tests.integration.real_mslite.environment
	$(PYTEST) -n $(JOBS) -m "not npu" --reruns 1

# The real MindSpore Lite 2.0.0 in a Python 3.7 of its own; skipped with the reason where either cannot be had.
real-mslite: $(VENV)/.installed
	$(BIN)/python -m tests.integration.real_mslite.environment
	$(PYTEST) tests/integration/real_mslite

# The graphs without the native kernel: the function bodies answer.
test-plain: $(VENV)/.installed
	QWEN_NPU_NATIVE=off $(PYTEST) -n $(JOBS) -m "not full and not ui and not npu" --ignore tests/oracle

test-twin:
	cmake -S kernels -B build/kernels -DCMAKE_BUILD_TYPE=Release
	cmake --build build/kernels --parallel $(JOBS)
	ctest --test-dir build/kernels --output-on-failure --parallel $(JOBS)

bench: $(VENV)/.oracle
	$(BIN)/qwen-npu bench

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build $(VENV)

$(VENV)/.installed: pyproject.toml requirements.lock $(wildcard kernels/native/src/*) kernels/native/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=python3.11 ..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[dev]"
	$(PIP) ./kernels/native || echo "The native kernel was not built (a C++ compiler is needed): everything works, slower."
	touch $@

$(VENV)/.oracle: $(VENV)/.installed
	$(PIP) --editable ".[dev,oracle,cluster]"
	touch $@
