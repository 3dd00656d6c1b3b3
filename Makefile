# Every target sets itself up: it finds a Python, makes .venv and installs what it needs, once.

HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
ARGS ?=
WORKERS ?= 2
VENV ?= .venv
BENCH ?= $(patsubst scripts/bench_%.py,%,$(wildcard scripts/bench_*.py))

# The first interpreter that really runs: a name on PATH may be a shim that only prints an error.
PYTHON ?= $(shell for python in python3.12 python3.11 python3 python; do \
    if "$$python" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
        >/dev/null 2>&1; then echo "$$python"; break; fi; done)

# The server takes jax's CUDA build where there is a GPU (EXTRAS= keeps it on the CPU).
EXTRAS ?= $(if $(wildcard /dev/nvidiactl /proc/driver/nvidia/version),cuda)

comma := ,
bin := $(VENV)/bin
# One stamp for each set of extras: a second call finds it and starts at once.
serve_stamp := $(VENV)/.installed$(if $(EXTRAS),-$(subst $(comma),-,$(EXTRAS)))
test_stamp := $(VENV)/.installed-test
bench_stamp := $(VENV)/.installed-bench

.DEFAULT_GOAL := help
.PHONY: help serve test test-all test-gpu bench lint format clean
.NOTPARALLEL:

help:
	@echo 'make serve     serve a model: PORT=$(PORT) HOST=$(HOST) MODEL=<folder> ARGS="<flags of scripts/serve.py>"'
	@echo 'make test      tests and notebooks, without the slow ones: TESTS=<paths> ARGS="<flags of pytest>"'
	@echo 'make test-all  the slow ones too'
	@echo 'make test-gpu  GPU tests with the jax of python3; WHEELS=<folder> adds local wheels, no registry is asked'
	@echo 'make bench     the benchmarks beside their peers: BENCH="<names>" ARGS="<flags>"'
	@echo 'make lint      ruff and mypy (make format rewrites)'
	@echo 'make clean     remove .venv, caches and builds'

serve: $(serve_stamp)
	@exec $(bin)/python scripts/serve.py --host "$(HOST)" --port "$(PORT)" \
	    $(if $(MODEL),--model "$(MODEL)") $(ARGS)

# On the CPU also where there is a GPU: two workers would fight for it, and make test-gpu is for it.
pytest = JAX_PLATFORMS=cpu $(bin)/python -m pytest -n $(WORKERS) --dist worksteal --nbmake --nbmake-timeout=240
TESTS ?= tests $(wildcard notebooks)

test: $(test_stamp)
	$(pytest) -m "not slow and not gpu" $(TESTS) $(ARGS)

test-all: $(test_stamp)
	$(pytest) -m "not gpu" $(TESTS) $(ARGS)

bench: $(bench_stamp)
	@set -e; for name in $(BENCH); do \
	    echo "== bench_$$name"; $(bin)/python "scripts/bench_$$name.py" $(ARGS); \
	done

lint: $(test_stamp)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

format: $(test_stamp)
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

# On a GPU machine jax is usually there already and the network is not. Its own jax is kept when it
# sees the GPU; wheels of WHEELS go to a folder of ours that is put in front, not into the system.
GPU_PYTHON ?= python3
GPU_SITE ?= .gpu-site
WHEELS ?=
sees_gpu := $(GPU_PYTHON) -c 'import jax; print(jax.__version__, jax.devices("gpu"))'

test-gpu:
	@rm -rf "$(GPU_SITE)"; mkdir -p "$(GPU_SITE)"
	@set -e; if [ -n "$(WHEELS)" ]; then \
	    wheels=$$(ls "$(WHEELS)"/*.whl); \
	    if $(sees_gpu) >/dev/null 2>&1; then \
	        wheels=$$(ls "$(WHEELS)"/*.whl | grep -Ev '/(jax|jaxlib|jax_cuda[^/]*)-[^/]*$$' || true); \
	    fi; \
	    if [ -n "$$wheels" ]; then \
	        echo "$$wheels" | xargs $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps \
	            --find-links "$(WHEELS)" --target "$(GPU_SITE)"; \
	    fi; \
	fi
	@PYTHONPATH="$(abspath $(GPU_SITE)):$$PYTHONPATH" $(sees_gpu) || \
	    { echo "make test-gpu: the jax of $(GPU_PYTHON) sees no GPU" >&2; exit 1; }
	PYTHONPATH="$(abspath $(GPU_SITE)):$$PYTHONPATH" $(GPU_PYTHON) -m pytest -m gpu tests $(ARGS)

clean:
	rm -rf .venv .gpu-site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# A stamp is written only after pip is through, so an interrupted install is done again; an
# environment that cannot run pip (interrupted earlier, or its Python is gone) is made anew.
define install # extras, stamp
	@set -e; if ! $(bin)/python -m pip --version >/dev/null 2>&1; then \
	    if [ -z "$(PYTHON)" ]; then \
	        echo "k3jax needs Python 3.11 or 3.12 with venv and pip (PYTHON=<path> names one)" >&2; \
	        exit 1; \
	    fi; \
	    rm -rf "$(VENV)"; \
	    "$(PYTHON)" -m venv "$(VENV)"; \
	fi
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(bin)/python -m pip install --quiet --disable-pip-version-check -e ".$(if $(1),[$(1)])"
	@touch $(2)
endef

# Installing never takes packages away, so the tests' environment serves as well.
$(VENV)/.installed: pyproject.toml
	$(call install,,$@)

$(test_stamp): pyproject.toml
	$(call install,test,$@ $(VENV)/.installed)

$(bench_stamp): pyproject.toml
	$(call install,test$(comma)bench,$@ $(test_stamp) $(VENV)/.installed)

ifneq ($(serve_stamp),$(VENV)/.installed)
$(serve_stamp): pyproject.toml
	$(call install,$(EXTRAS),$@ $(VENV)/.installed)
endif
