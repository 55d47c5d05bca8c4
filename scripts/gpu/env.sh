# Source this after install.sh:  . .gpu/env.sh [FOLDER]
. "${1:-$HOME/antkv-gpu}/venv/bin/activate"
# There is no network: nobody is asked for a model, and nobody is told.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# FlashInfer is not in the bundle.
export VLLM_USE_FLASHINFER_SAMPLER=0
