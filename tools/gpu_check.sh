#!/usr/bin/env bash
# Run the GPU check from the repository root. Prints one line per step (PASS, FAIL or SKIP, with seconds) and a JSON summary.
#
#   bash tools/gpu_check.sh [--out DIR] [--minutes 25]      a second call continues the first one
#   bash tools/gpu_check.sh --pack DIR                      install packages into DIR for a machine that has torch only; run there with PYTHONPATH=DIR
#
# Exit code: 0 if no step failed, 1 if a step failed, 2 if the check itself is broken. Without a GPU, only the commands of the steps are
# checked. Steps that need vLLM, Transformer Engine or TRL are skipped where these are not installed. docs/gpu.md describes each step.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${MEGATRON_GRPO_PYTHON:-python}" tools/gpu_checking/run.py "$@"
