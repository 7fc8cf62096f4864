# Makes .venv once, and runs what is in it. `make` alone lists what there is.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.PHONY: help env generate named test test-slow test-gpu libraries lint docs

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
READY := .venv/ready

define HELP
make generate SPEC=specs/NAME.yaml [ARGS=...]   write and verify a kernel for a spec
make test [ARGS=...]                            run the quick tests, in a few minutes
make test-slow                                  run the others: compilers, sweeps and whole gates
make test-gpu                                   run the tests that need an H100
make libraries                                  run patched models in other libraries' hands, beside unpatched ones
make lint                                       ruff, mypy, import-linter
make docs                                       build the documentation into site/
make env                                        only make .venv, which the others do by themselves
PYTHON=/path/to/python3.12 chooses the Python (3.11 or newer) that .venv is made with.
endef
export HELP

help:
	@echo "$$HELP"

env: $(READY)

generate: named $(READY)
	@$(BIN)/coda-agent generate "$(SPEC)" $(ARGS)

named:
	@[[ -n "$(SPEC)" ]] || { echo "no spec given; use: make generate SPEC=specs/NAME.yaml" >&2; exit 2; }

# Nothing may reach the user's home: QuACK and Triton keep their caches there, or in /tmp, unless told.
test test-slow: export CODA_AGENT_CACHE := $(CURDIR)/.cache/coda-agent
test test-slow: export QUACK_CACHE_DIR := $(CURDIR)/.cache/quack
test test-slow: export TRITON_CACHE_DIR := $(CURDIR)/.cache/triton
test test-slow: export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.cache/inductor
test: TESTS := not slow
test-slow: TESTS := slow
test test-slow: $(READY)
	@$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations 10 -m "$(TESTS)" $(ARGS)

test-gpu: $(READY)
	@$(BIN)/python -m pytest -q tests/gpu $(ARGS)

libraries: export HF_HUB_OFFLINE := 1
libraries: $(READY)
	@$(BIN)/python -m benchmarks.models.libraries

lint: $(READY)
	@$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check --quiet .
	$(BIN)/python -m mypy
	$(BIN)/python -m mypy benchmarks examples tests docs/images/make.py docs/pages.py
	$(BIN)/python -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-logo

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY)
	@$(BIN)/python -m mkdocs build --strict --quiet

# A PyTorch with CUDA that $(PYTHON) already has is kept: it suits the machine's driver, and weighs gigabytes.
# Otherwise PyTorch comes from PyPI where there is an NVIDIA GPU, and is a CPU build where there is none.
CPU_WHEELS := https://download.pytorch.org/whl/cpu
define CUDA_TORCH
import os, sys
try:
    import torch
except ImportError:
    raise SystemExit
def major_minor(version):
    return [int(part) for part in version.split(".")[:2]]
if torch.version.cuda and major_minor(torch.__version__) >= major_minor(sys.argv[1]):
    print(torch.__version__, os.path.dirname(os.path.dirname(torch.__file__)))
endef
export CUDA_TORCH

define INSTALLED
import sys
from importlib.metadata import version
import torch
build = "CUDA" if torch.version.cuda else "CPU"
print(f"coda-agent: ready, with PyTorch {torch.__version__} ({build} build) and QuACK {version('quack-kernels')}")
if build != sys.argv[1]:
    print(f"coda-agent: a {sys.argv[1]} build was expected: what pip is set up with has none. To choose one,",
          "install PyTorch for PYTHON, remove .venv and try again", file=sys.stderr)
endef
export INSTALLED

$(READY): pyproject.toml constraints.txt
	@say() { echo "coda-agent: $$*"; }
	fail() { say "$$*" >&2; exit 1; }
	pip() { $(BIN)/python -m pip --disable-pip-version-check --no-input -qq "$$@"; }
	# What was changed since .venv was made only updates it, whatever PYTHON is by now.
	host="$(PYTHON)"
	if [[ -e $@ ]] && $(BIN)/python -c ''; then host=$(BIN)/python; fi
	command -v "$$host" >/dev/null || fail "$$host is not found; install Python 3.11 or newer, or: make PYTHON=/path/to/it"
	found=$$("$$host" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	"$$host" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    fail "$$host is Python $$found, and 3.11 or newer is needed: make PYTHON=/path/to/python3.12"
	"$$host" -c 'import ensurepip' 2>/dev/null || \
	    fail "$$host has no ensurepip, so it cannot make .venv; on Debian or Ubuntu: sudo apt install python$$found-venv"

	oldest=$$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
	read -r kept beside <<< "$$("$$host" -c "$$CUDA_TORCH" "$$oldest" 2>/dev/null)" || true
	if [[ "$$host" != $(BIN)/python ]]; then
	    say "making .venv with Python $$found; this first run takes a few minutes"
	    "$$host" -m venv --clear $${kept:+--system-site-packages} .venv
	    # A virtual environment's own packages are not system ones, so show .venv the way to that PyTorch.
	    if [[ -n "$$kept" ]]; then
	        echo "import site; site.addsitedir('$$beside')" > "$$($(BIN)/python -c \
	            'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-of-$$found.pth"
	    fi
	fi

	constraints=constraints.txt build=CPU
	torch=$$(sed -n 's/^torch==//p' constraints.txt)
	if [[ -n "$$kept" ]]; then
	    say "keeping PyTorch $$kept of $$host"
	    constraints=.venv/constraints.txt build=CUDA
	elif nvidia-smi -L >/dev/null 2>&1; then
	    say "installing PyTorch $$torch with CUDA from PyPI, for the NVIDIA GPU here"
	    constraints=.venv/constraints.txt build=CUDA
	    pip install "torch==$$torch"
	else
	    say "installing the CPU build of PyTorch $$torch: no NVIDIA GPU here"
	    # Some networks do not reach the CPU wheels' index, but have that build on the index pip is set up with.
	    pip install --no-deps --timeout 15 --retries 1 --extra-index-url $(CPU_WHEELS) "torch==$$torch+cpu" \
	        2>/dev/null || pip install --no-deps "torch==$$torch"
	fi
	grep -vE '^(torch|triton|cuda-[a-z]+)==' constraints.txt > .venv/constraints.txt

	say "installing the other packages in the versions of constraints.txt"
	pip install -c $$constraints -e '.[author,docs,draw,test]'
	$(BIN)/python -c "$$INSTALLED" $$build
	touch $@
