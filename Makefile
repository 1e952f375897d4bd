# make quickstart: set everything up and watch a small model learn.   make test: set everything up and run the tests.
# make docs: build the documentation site into site/.
# make test-full: all tests and the large matrix of layouts, in which any three options meet. SHARD=K/N runs the K-th of N parts.
# make test-share: the part of test-full whose turn it is after this number of commits, without what make test runs.
# make test-changed: the tests that changed files reach through imports; BASE names the commit to compare with, default HEAD.
# make test-gpu: the tests that need a GPU, on a machine that has one. There CUDA_VISIBLE_DEVICES= make test runs the others.
# make test-te: Transformer Engine's layers on a machine without a GPU, its kernels in torch; sets everything up as for GPUs, which compiles.
# make test-fake-gpu: the code for GPUs on a CUDA runtime without a GPU, whose folder MEGAGRPO_FAKE_GPU names (docs/gpu_tests.md); PYTHON names
# an interpreter with torch's build for CUDA, ARGS="-m fake_gpu" adds the long tests.
# make test-adapters: the adapters of environments, each with its real package; `make adapters` builds a Python below .adapters for each
# package whose versions do not fit vLLM's (ADAPTERS names another folder).
# make lock: writes the versions that are tested together, for CPU and GPU; ARGS=--upgrade takes the newest that fit pyproject.toml.
# make test-slurm: jobs on a real Slurm with pretend nodes; installs Debian's slurm-wlm, munge and iproute2 where they are missing, and needs root.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 10000
# Processes that share the tests, more than two cores would need: many tests wait for servers and ranks.
WORKERS ?= 3

ADAPTERS ?= $(PWD)/.adapters

.PHONY: quickstart docs browser test adapters test-adapters test-full test-share test-changed test-gpu test-te test-fake-gpu test-slurm setup setup-dev lock
.DEFAULT_GOAL := quickstart

setup:
	@launch/setup.sh

setup-dev:
	@launch/setup.sh dev

lock: setup
	@PATH=$$PWD/.uv-boot/bin:$$PATH PYTHONPATH=. .venv/bin/python launch/lock.py $(ARGS)

quickstart: setup
	@launch/local.sh configs/quickstart.yaml run.overwrite=true $(ARGS)

docs: setup-dev
	@.venv/bin/python docs/site.py $(ARGS)

# The report's page is tested in a real browser; without one these tests are skipped and name the reason. Only CI installs it by itself.
browser:
	@{ command -v chromium && command -v chromedriver; } >/dev/null || [ "$(CI)" != true ] || [ "$$(id -u)" != 0 ] || \
	{ export DEBIAN_FRONTEND=noninteractive; apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium chromium-driver >/dev/null; } || \
	echo "make: Chromium could not be installed; tests in a browser are skipped"

test: setup-dev browser
	@OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 .venv/bin/python -m pytest -q -n $(WORKERS) $(ARGS)

adapters: setup-dev
	@PATH=$$PWD/.uv-boot/bin:$$PATH; for NAMED in verifiers=verifiers==0.2.1 verifiers_v1=verifiers==0.4.0 harbor=harbor==0.26.0; do \
	uv venv -q --allow-existing --python .venv/bin/python "$(ADAPTERS)/$${NAMED%%=*}" && \
	uv pip install -q --python "$(ADAPTERS)/$${NAMED%%=*}/bin/python" "$${NAMED#*=}" || exit; done

test-adapters: adapters
	@OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 MEGAGRPO_ADAPTERS="$(ADAPTERS)" .venv/bin/python -m pytest -q -rs $(ARGS) tests/unit/environments/test_adapters.py tests/unit/environments/test_example_adapters.py

test-full: setup-dev
	@OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 .venv/bin/python -m pytest -q -m "not slurm and not gpu and not te and not fake_gpu" \
	$(if $(SHARD),--shard $(SHARD)) $(ARGS)

# Over SHARES commits in a row each share has run once.
SHARES ?= 16
test-share: setup-dev
	@SHARE=$$(( $$(git rev-list --count HEAD) % $(SHARES) + 1 ))/$(SHARES); echo "make: share $$SHARE of the full tests"; \
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 .venv/bin/python -m pytest -q -n $(WORKERS) --shard $$SHARE \
	-m "full and not slurm and not gpu and not te and not fake_gpu" $(ARGS)

test-changed: setup-dev
	@FILES=$$(.venv/bin/python tests/changed.py $(BASE)); [ -n "$$FILES" ] || { echo "make: no test is reached"; exit 0; }; \
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 .venv/bin/python -m pytest -q -n $(WORKERS) $(ARGS) $$FILES

test-gpu: setup-dev
	@OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false .venv/bin/python -m pytest -q -m gpu -rs $(ARGS)

test-te:
	@launch/setup.sh gpu dev
	@OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= LD_LIBRARY_PATH=$$(printf '%s:' .venv/lib/python3.12/site-packages/nvidia/*/lib)$$LD_LIBRARY_PATH .venv/bin/python -m pytest -q -m te -rs $(ARGS) tests/te

test-fake-gpu:
	@OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(or $(PYTHON),.venv/bin/python) -m pytest -q -m "fake_gpu and not full" -rs $(ARGS) tests/fake_gpu

test-slurm: setup-dev
	@command -v slurmctld >/dev/null && command -v ip >/dev/null || apt-get install -y --no-install-recommends slurm-wlm munge iproute2
	@OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 .venv/bin/python -m pytest -q -m slurm $(ARGS) tests/slurm
