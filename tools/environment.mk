# What every process that the Makefile starts finds in its environment.

# Everything is local: a hub must not be asked.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# OpenMP threads that wait for work must sleep: spinning on shared cores doubles the CPU seconds.
export OMP_WAIT_POLICY := PASSIVE
# glibc keeps large blocks instead of asking the kernel for zeroed pages at every use: an update takes a sixth to a quarter
# less time (tests/evidence/performance.md).
export MALLOC_MMAP_MAX_ := 0
export MALLOC_TRIM_THRESHOLD_ := 17179869184
export MALLOC_TOP_PAD_ := 67108864
# No C++ warnings: vLLM binds memory to NUMA nodes and says so on every start.
export TORCH_CPP_LOG_LEVEL := ERROR
# Without bfloat16 instructions a CPU emulates its products, at an eighth of float32's speed (measured, AVX2).
export DTYPE := $(shell grep -qs bf16 /proc/cpuinfo || echo --policy.compute-dtype float32)
# Images of containers like to set it. Each process would then compile all that it imports, which is half of the seconds
# until torch and vLLM are there (measured).
unexport PYTHONDONTWRITEBYTECODE
