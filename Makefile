# make demo and make test work on a fresh machine: they make their own environment in .venv.
# Where torch is importable already, that torch is used (and nothing is downloaded if the rest is there
# as well); else torch $(TORCH) is installed with pip.

# An empty variable counts as unset.
SETTINGS := PYTHON TORCH JOBS TORCH_CUDA_ARCH_LIST AMP_MP_CUDA AMP_MP_LOOPS SEEDS FIRST COMPILERS
$(foreach name,$(SETTINGS),$(if $($(name)),,$(eval undefine $(name))))

PYTHON ?= python3
# The first torch for Python 3.15 is 2.15.
TORCH ?= $(shell $(PYTHON) -c 'import sys; print("2.13.0" if sys.version_info < (3, 15) else "2.15.0")' 2>/dev/null)
VENV := .venv
PY := $(VENV)/bin/python
ZOO := .venv-zoo
SITE := .venv-docs
JOBS ?= 2
# What this machine runs is compiled: kernels for its GPU, none without one, and loops for its processor's
# instruction sets. AMP_MP_CUDA=1 asks for kernels without a GPU, for one that many have, AMP_MP_LOOPS=all for
# all loops. pip compiles everything.
GPU := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>&1 | grep -xE '[0-9.]+' | sort -u)
TORCH_CUDA_ARCH_LIST ?= $(or $(GPU),9.0)
AMP_MP_CUDA ?= $(if $(GPU),,0)
AMP_MP_LOOPS ?= here
NATIVE := $(shell find csrc -type f) $(wildcard build_tools/*.py) setup.py pyproject.toml
PACKAGE := $(shell find python/amp_mp -name '*.py' -o -name '*.pyi')
SOURCES := $(shell find csrc tests benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu')
PYTHON_DIRS := python tests examples benchmarks build_tools setup.py

.PHONY: demo docs docs-look docs-serve test test-all test-rest test-fast test-wheel test-aarch64 test-choices test-processors same-bits test-zoo test-distributed test-streams lint warnings format bench gpu gpu-peers gpu-tests gpu-bench gpu-sanitize clean build wheel

demo: build
	$(PY) examples/demo.py

# Processes that tests start import the package from bytecode, which spares each of them .1 s.
unexport PYTHONDONTWRITEBYTECODE

# The site of docs/ and of the docstrings, in build/site; a broken link or reference is an error. Not with
# --quiet, which hides warnings from --strict.
docs: $(SITE)/tools
	$(SITE)/bin/mkdocs build --strict

# Every page and the search in Chromium (apt install chromium), with photographs.
docs-look: docs
	$(SITE)/bin/python build_tools/browse.py

docs-serve: $(SITE)/tools
	$(SITE)/bin/mkdocs serve

# Two workers; tests that share processes stay in one of them (marker xdist_group). Warnings of amp_mp
# fail a test (pyproject.toml); another torch's or Python's own are counted, and shown without make.
PYTEST := $(PY) -m pytest -n $(JOBS) --dist loadgroup --disable-warnings

# What a change of Python or C++ can break here.
test: build
	$(PYTEST) -m "not full"

# Everything; test-rest is what `make test` leaves out: emulators under sanitizers, mutants of the
# kernels, every file on the pretend GPU, scripts of `make gpu`, whole products of parameters.
test-all: build
	$(PYTEST)

test-rest: build
	$(PYTEST) -m full

# `make test` under each choice that a processor or a user can make for products and loops. All four
# run, and each one's result is printed at the end.
CHOICES := AMP_MP_PRODUCTS=float32 AMP_MP_PRODUCTS=bfloat16 AMP_MP_CPU=avx2 AMP_MP_CPU=baseline
test-choices: build
	@failed=0; results=; for choice in $(CHOICES); do echo "== $$choice"; result=passed; \
	  env $$choice $(PYTEST) -m "not full" || { result=failed; failed=1; }; \
	  results="$$results$$choice: $$result\n"; done; printf "$$results"; exit $$failed

# What to run while writing: everything that takes less than a second and compiles nothing.
test-fast: build
	$(PYTEST) -m "not slow and not full"

# The wheel for $(PYTHON): bindings for torch 2.11 to 2.15, kernels for all architectures. Half an hour
# of CPU time and 2.7 GB of downloads. test-wheel TORCH=2.15.0 installs it beside that torch and runs tests there.
# ARCH=aarch64 makes it for another processor (apt install g++-aarch64-linux-gnu).
wheel:
	"$(PYTHON)" build_tools/wheel.py $(if $(ARCH),--arch $(ARCH))

test-wheel:
	"$(PYTHON)" build_tools/test_wheel.py --torch $(TORCH)

# A wheel for aarch64 under qemu: the README's example, tests, and states of every optimizer in every
# format, which have to be this machine's bits. Half an hour, .5 GB of downloads at first.
test-aarch64: build
	$(PY) build_tools/test_aarch64.py --torch $(TORCH) --jobs $(JOBS)

# The tests that depend on instructions, and README's example, under qemu on a processor without AVX, one
# of Intel's and one of AMD's with AVX2; states of every optimizer in every format, which have to be this
# machine's bits.
test-processors: build
	$(PY) build_tools/test_processors.py --jobs $(JOBS)

# Whether the working tree computes the bits of another commit: every optimizer and wrapper in every format,
# in one table. SETS="baseline avx2" compares under each AMP_MP_CPU. 2 minutes of compiling at first.
same-bits: $(if $(BASE),build)
	$(if $(BASE),,$(error BASE is missing: make same-bits BASE=HEAD~1, or another commit, branch or tag))
	$(PY) build_tools/same_bits.py "$(BASE)" --jobs $(JOBS) $(if $(SETS),--sets $(SETS))

# Models of transformers, timm, torchvision, diffusers and torch_geometric, in an environment of
# their own with pinned versions (1 GB without CUDA). Prints the table of docs/benchmarks.md.
test-zoo: $(ZOO)/built
	AMP_MP_ZOO=1 $(ZOO)/bin/python -m pytest tests/zoo

# Sharded training on 1, 2 and 4 processes of this machine: every optimizer in every format and layout,
# 20 long random runs of each layout, all commands of docs/distributed.md. `make test` runs a selection.
test-distributed: build
	AMP_MP_DISTRIBUTED=1 $(PYTEST) tests/distributed tests/optim/state/test_sharded_state.py \
	  tests/examples/test_parallel_training.py tests/project/test_distributed_docs.py

# Without a GPU: every test of the CUDA path with kernels that run as late as their streams permit, in
# SEEDS random orders from FIRST on, every second one on a side stream. 3 to 5 minutes an order.
SEEDS ?= 20
FIRST ?= 2
test-streams: build
	$(PY) tests/emulators/random_orders.py --seeds $(SEEDS) --first $(FIRST)

# Compiles nothing: mypy reads the stubs of the native library.
lint: $(VENV)/linters
	$(PY) -m ruff check $(PYTHON_DIRS)
	$(PY) -m ruff format --check $(PYTHON_DIRS)
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(SOURCES)
	@! grep -rnE '#include *[<"](torch|ATen|c10)/' csrc/core csrc/cuda csrc/cpu csrc/plan.h \
	  || { echo 'no torch header belongs in there: csrc/torch is the only C++ that knows torch'; exit 1; }
	@! grep -hnE '(-ffast-math|--use_fast_math)' build_tools/*.py | grep -v '^[0-9]*:#' \
	  || { echo 'fast-math lets the compiler delete the overflow check'; exit 1; }

# Every native file under each compiler, with its warnings as errors: 2 to 4 minutes a compiler.
COMPILERS ?= g++-12 g++-14 g++-16 clang++-19
warnings: $(VENV)/tools
	for cxx in $(COMPILERS); do \
	  CXX=$$cxx AMP_MP_WERROR=1 AMP_MP_OBJECTS=build/warnings/$$cxx MAX_JOBS=$(JOBS) \
	    $(PY) setup.py --quiet build_ext --build-lib build/warnings/$$cxx || exit 1; done

format: $(VENV)/linters
	$(PY) -m ruff check --fix $(PYTHON_DIRS)
	$(PY) -m ruff format $(PYTHON_DIRS)
	$(VENV)/bin/clang-format -i $(SOURCES)

bench: build
	OMP_NUM_THREADS=1 $(PY) benchmarks/step.py

# On a machine with a GPU, with its own python3 and torch: benchmarks/gpu/README.md. gpu is all three parts, with
# what decides the most first; each part takes less than 10 minutes, and they share one build.
gpu:
	bash benchmarks/gpu/gpu.sh

# Other libraries for gpu-bench, from the package index, in build/peers: copy it to the machine with the
# GPU. PEERS="--cuda 12.8 --python 3.11" if it has others than 13.0 and 3.12.
gpu-peers: $(VENV)/tools
	$(PY) benchmarks/gpu/gpu_peers_folder.py $(PEERS)

gpu-tests gpu-bench gpu-sanitize: gpu-%:
	bash benchmarks/gpu/gpu.sh $*

clean:
	rm -rf build dist demo .venv .venv-zoo .venv-docs .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf python/amp_mp/native
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

build: $(VENV)/built

# First without pip, which would not show how far it is; then pip finds all that is compiled.
ASKED := AMP_MP_CUDA=$(AMP_MP_CUDA) AMP_MP_LOOPS=$(AMP_MP_LOOPS) TORCH_CUDA_ARCH_LIST="$(TORCH_CUDA_ARCH_LIST)"
BUILD := $(ASKED) AMP_MP_OBJECTS=build/native MAX_JOBS=$(JOBS)
$(VENV)/built: $(VENV)/tools $(NATIVE) build/asked
	@$(BUILD) $(PY) setup.py --quiet build_ext --inplace
	@$(BUILD) $(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

# Newer than the last build where that was asked for something else.
build/asked: FORCE
	@mkdir -p build; echo '$(ASKED)' | cmp -s - $@ || echo '$(ASKED)' > $@

.PHONY: FORCE
FORCE:

$(VENV)/linters: $(VENV)/tools
	$(PY) -m pip install --quiet $$($(PY) build_tools/packages.py lint)
	@touch $@

$(ZOO)/built: $(ZOO)/tools $(NATIVE) $(PACKAGE)
	AMP_MP_CUDA=0 AMP_MP_LOOPS=$(AMP_MP_LOOPS) AMP_MP_OBJECTS=build/zoo MAX_JOBS=$(JOBS) $(ZOO)/bin/python -m pip install --quiet \
	  --no-build-isolation --no-deps --force-reinstall .
	touch $@

$(ZOO)/tools: tests/zoo/requirements.txt tests/zoo/requirements_no_deps.txt
	"$(PYTHON)" -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet -r tests/zoo/requirements.txt
	$(ZOO)/bin/python -m pip install --quiet --no-deps -r tests/zoo/requirements_no_deps.txt
	touch $@

$(SITE)/tools: pyproject.toml
	"$(PYTHON)" -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet $$($(SITE)/bin/python build_tools/packages.py docs)
	touch $@

$(VENV)/tools: pyproject.toml .ci/environment
	@bash .ci/environment "$(PYTHON)" "$(VENV)" "$(TORCH)"
	@touch $@
