#!/usr/bin/env bash
# What a GPU has to show, in one command, from the repository root: a line a step, PASS, FAIL or SKIP, with seconds; one JSON at the end.
#
#   bash tools/gpu_check.sh [--out DIR] [--minutes 25]      a second call goes on where the first one stopped
#   bash tools/gpu_check.sh --pack DIR                      wheels for a box that has torch only; then there: PYTHONPATH=DIR bash tools/gpu_check.sh
#
# Exit code: 0 where nothing failed, 1 where something did, 2 where the check itself is broken. Without a GPU it says so, checks itself, and
# exits 0. Steps that need vLLM, Transformer Engine or TRL are skipped where these are not there. docs/gpu.md says what each step shows.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${MEGATRON_GRPO_PYTHON:-python}" tools/gpu_checking/run.py "$@"
