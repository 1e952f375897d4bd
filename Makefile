# make quickstart: set everything up and watch a small model learn.   make test: set everything up and run the tests.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0

.PHONY: quickstart test setup
.DEFAULT_GOAL := quickstart

setup:
	@launch/setup.sh

quickstart: setup
	@launch/local.sh configs/quickstart.yaml $(ARGS)

test: setup
	@OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 .venv/bin/python -m pytest -q $(ARGS)
