# The steps of `make gpu-check`: first what everything else needs, last what takes longest. What a step printed is in
# $(OUT)/STEP.txt, or, when it failed, in $(OUT)/STEP.failed.txt. One that passed is not run again until sources change.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
OUT := gpu-results
PYTHON := python
CONTEXTS := 1024 8192 32768 131072
SOURCES := $(shell find vllm_antkv benchmarks tests/gpu tests/kernels -name '*.py' -o -name '*.cu' -o -name '*.cuh')
# Only a thread can end a test that waits for a kernel that never ends.
PYTEST := -m pytest -v -m gpu -p no:cacheprovider --timeout-method thread --timeout
DECODE := $(CONTEXTS:%=decode-%)
# For a machine that is there for a quarter of an hour: what decides about designs, within ten minutes.
QUICK := doctor engines prompts first-decode-default prefill compiled

STEPS := doctor kernels-cuda first-decode-default first-decode-no-anchors checked-kernels-cuda races kernels-triton \
	prompts graphs exactness compiled pages llama serve $(DECODE) prefill engines engines-others compiled-v1

.PHONY: all quick $(STEPS)
all: $(STEPS)
quick: $(QUICK)
$(STEPS): %: $(OUT)/%.txt

# `timeout` ends all processes of a step, also when make is ended: they would hold the memory that the next step needs.
$(OUT)/%.txt: $(SOURCES)
	@mkdir -p $(OUT) && echo "== $*"
	@trap 'kill %1 2>/dev/null || :' EXIT; \
	timeout --kill-after=5 $(LIMIT) $(PROGRAM) $(RUN) >$(OUT)/$*.failed.txt 2>&1 </dev/null & \
	wait $$! && mv $(OUT)/$*.failed.txt $@ || { tail -n 15 $(OUT)/$*.failed.txt; exit 1; }

$(STEPS:%=$(OUT)/%.txt): LIMIT = 240
$(STEPS:%=$(OUT)/%.txt): PROGRAM = $(PYTHON)
benchmark = -m benchmarks.$(1) --json $(OUT)/$*.json

# What decides about designs, for a machine that may be gone in ten minutes: do the kernels run, are they right, how fast
# is decoding with and without anchors.
$(OUT)/doctor.txt: RUN = -c 'from vllm_antkv.cli import main; main()' doctor
$(OUT)/kernels-cuda.txt: RUN = $(PYTEST) 120 -n 4 tests/gpu/test_cuda_gpu.py
$(OUT)/first-decode-default.txt: RUN = $(call benchmark,gpu_decode) --contexts 32768 --batches 8 --splits 4096
$(OUT)/first-decode-no-anchors.txt: RUN = $(call benchmark,gpu_decode) --contexts 32768 --batches 8 --anchor-share 0
# The same tests where an access outside of what a kernel was given names its line.
$(OUT)/checked-kernels-cuda.txt: export ANTKV_CHECK = 1
$(OUT)/checked-kernels-cuda.txt: RUN = $(PYTEST) 120 -n 4 tests/gpu/test_cuda_gpu.py
# Threads that come too early at what others write in shared memory. A few shapes, as it takes a hundred times as long.
$(OUT)/races.txt: PROGRAM = compute-sanitizer --tool racecheck --error-exitcode 1 $(PYTHON)
$(OUT)/races.txt: RUN = $(PYTEST) 400 tests/gpu/test_cuda_gpu.py -k 'drafts and (1bit or 0.75bit)'
# Kernels are compiled anew for every shape, in all configurations: processes side by side. A kernel that accesses what it
# must not makes the other tests of its process fail too, and no others.
$(OUT)/kernels-triton.txt: RUN = $(PYTEST) 240 -n 8 tests/gpu/test_triton_gpu.py
$(OUT)/prompts.txt: RUN = $(PYTEST) 120 -n 4 tests/gpu/test_varlen_gpu.py
$(OUT)/graphs.txt: RUN = $(PYTEST) 120 tests/gpu/test_graphs_gpu.py
$(OUT)/exactness.txt: RUN = $(PYTEST) 240 tests/gpu/test_exactness_gpu.py
$(OUT)/compiled.txt: RUN = $(PYTEST) 240 tests/gpu/test_compiled_gpu.py
$(OUT)/pages.txt: RUN = $(PYTEST) 240 tests/gpu/test_page_store_gpu.py
$(OUT)/llama.txt: RUN = $(PYTEST) 240 tests/gpu/test_llama_gpu.py
$(OUT)/serve.txt: RUN = -m scripts.demo --once
# A context in each: where a kernel breaks one process, the other contexts are still measured.
$(DECODE:%=$(OUT)/%.txt): RUN = $(call benchmark,gpu_decode) --contexts $(*:decode-%=%) --splits 4096
$(OUT)/prefill.txt: RUN = $(call benchmark,gpu_prefill)
$(OUT)/engines.txt: RUN = $(call benchmark,gpu_engines) --kv-gib 20
$(OUT)/engines-others.txt: RUN = $(call benchmark,gpu_engines) --sides antkv-1bit/triton turboquant_4bit_nc turboquant_3bit_nc
# Everything above runs on what vLLM takes by itself, which is model runner V2.
$(OUT)/compiled-v1.txt: export VLLM_USE_V2_MODEL_RUNNER = 0
$(OUT)/compiled-v1.txt: RUN = $(PYTEST) 240 tests/gpu/test_compiled_gpu.py
$(addprefix $(OUT)/,$(addsuffix .txt,races kernels-triton exactness compiled pages llama compiled-v1 engines engines-others)): LIMIT = 420
