# `make serve` and `make test` are all that a new user needs. Each target installs what it needs first.
PYTHON ?= python3
VENV := .venv/bin
# Most tests keep one core busy. The tests of one file share fixtures, so they stay in one process.
TWO_AT_A_TIME := --numprocesses 2 --dist loadfile --no-loadscope-reorder

CPU_LIBRARY := from fastattention_vllm.attention.cpu.library import library_path; print(library_path())

SECONDS ?= 60

.PHONY: help serve soak test test-more test-full test-gpu test-ascend conformance lint docs sanitize sanitize-gpu mutate build volta wheel setup setup-dev clean

help:             ## show this list
	@grep -hE '^[a-z-]+: *.*##' $(MAKEFILE_LIST) | sed -E 's/: .*##/\t/' | expand -t 14

serve: setup      ## serve the demo model on 127.0.0.1:8000 (PORT=... for another)
	@exec $(VENV)/python scripts/serve.py

test: setup-dev   ## lint, types and tests: about 25 minutes on 2 cores
	$(VENV)/python scripts/lint.py
	$(VENV)/python -m pytest -m "not more and not full" $(TWO_AT_A_TIME)

test-more: setup-dev ## the longer tests: about 45 minutes on 2 cores
	$(VENV)/python -m pytest -m "more and not full" $(TWO_AT_A_TIME)
# Host layers on an NPU use the same kernels, so those of .venv need not be built again.
	@FASTATTENTION_CPU_LIBRARY=$$($(VENV)/python -c '$(CPU_LIBRARY)') $(PYTHON) scripts/ascend.py --torch-npu 2.10.0.post4 --some

test-full: setup-dev volta-images ## the tests that install packages: the wheel on Python 3.10 to 3.13 and with vLLM for the V100, the source distribution for aarch64, the workflows, the Kubernetes manifests, Ray over two machines, Ray Serve, two servers on one machine, schemathesis, a container, servers with little memory, the status page in a browser, further models with images and drafts, the CPU kernels without each feature and under sanitizers, further servers and refusals, all tests for Ascend; estimated at 160 minutes on 2 cores, and 10 more if `make volta` has not run; downloads 10 GB
	$(VENV)/python -m pytest -m full --durations 0
	@$(PYTHON) scripts/ascend.py

soak: setup-dev   ## the demo server under mixed load (SECONDS=..., ARGUMENTS='--server-arguments ... --json FILE', see `python -m scripts.soak --help`)
	$(VENV)/python -m scripts.soak --seconds $(SECONDS) $(ARGUMENTS)

test-gpu:         ## tests on this machine's NVIDIA GPU, in the current Python (PYTHON=...); needs vLLM, pytest, hypothesis, and the output of `make volta`
	$(PYTHON) -m pytest tests/gpu

conformance:      ## upstream vLLM's attention tests on this backend, for several vLLM versions (see `scripts/conformance.py --help`)
	@$(PYTHON) scripts/conformance.py $(ARGUMENTS)

test-ascend:      ## the Ascend tests with genuine torch_npu and vllm-ascend, in separate environments; needs gcc and binutils, but no NPU
	@$(PYTHON) scripts/ascend.py $(ARGUMENTS)

lint: setup-dev   ## ruff, mypy --strict, clang-format
	$(VENV)/python scripts/lint.py

docs: setup-dev   ## generate the pages of docs/ that are made from the code, and build the site in build/site
	$(VENV)/python -m scripts.docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/python -m mkdocs build --strict --quiet

sanitize: setup-dev ## kernel tests under ASan, UBSan and TSan, and a check that each of them reports a planted bug; needs g++
	$(VENV)/python scripts/sanitize.py --self-check

sanitize-gpu:     ## tests of the V100 kernels under compute-sanitizer on this machine's GPU, and a check that it reports missing barriers; needs compute-sanitizer and the requirements of test-gpu
	@$(PYTHON) -m scripts.sanitize_gpu --self-check

mutate: setup-dev ## break the code in many places, one at a time, and check that the tests notice
	$(VENV)/python scripts/mutate.py tests/mutations/kernels.toml --jobs 2
	$(VENV)/python scripts/mutate.py tests/mutations/integration.toml
	$(VENV)/python scripts/mutate.py tests/mutations/placement.toml
	$(VENV)/python scripts/mutate.py tests/mutations/volta.toml
	$(VENV)/python scripts/mutate.py tests/mutations/volta_weights.toml
	$(VENV)/python scripts/mutate.py tests/mutations/parallel.toml
	$(VENV)/python scripts/mutate.py tests/mutations/ascend.toml
	$(VENV)/python scripts/mutate.py tests/mutations/doctor.toml
	$(VENV)/python scripts/mutate.py tests/mutations/plan.toml

build: setup      ## build the CPU kernels into .venv

volta: build/nvrtc/ready ## compile the V100 and T4 kernels into the package, so that wheels include them; needs no GPU, CUDA toolkit or torch
	build/nvrtc/bin/python -m kernels.volta.build fastattention_vllm/lib/volta

# Compiled if they are missing or older than their sources.
VOLTA_IMAGES := fastattention_vllm/lib/volta/manifest.json
.PHONY: volta-images
volta-images: $(VOLTA_IMAGES)
$(VOLTA_IMAGES): $(wildcard kernels/volta/*.py kernels/volta/src/*)
	@$(MAKE) volta

wheel: $(VOLTA_IMAGES) ## build the wheel with the CPU, V100 and T4 kernels into dist/, for Linux with glibc 2.27 or newer; 4 minutes on 2 cores
	$(PYTHON) scripts/wheel.py

# An environment with only the compiler, in the version that pyproject.toml pins.
build/nvrtc/ready: pyproject.toml
	$(PYTHON) -m venv --clear build/nvrtc
	build/nvrtc/bin/pip install --quiet $$(sed -n 's/.*"\(nvidia-cuda-nvrtc-cu12==[0-9.]*\)".*/\1/p' pyproject.toml)
	@touch $@

setup:
	@$(PYTHON) scripts/setup_env.py

setup-dev:
	@$(PYTHON) scripts/setup_env.py --dev

clean:            ## remove .venv, build/, the demo models and the compiled V100 kernels
	rm -rf .venv build models fastattention_vllm/lib/volta
