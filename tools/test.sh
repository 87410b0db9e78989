#!/usr/bin/env bash
# Installs what is missing, then runs every check of the project: style, floors, tests. Arguments go to pytest, which then runs alone:
#
#   bash tools/test.sh                                    everything
#   bash tools/test.sh tests/unit -k advantages           some tests
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin="$(bash tools/install.sh dev data math plot tensorboard)" || { echo "TESTS NOT RUN: the install failed, see above."; exit 1; }
export PATH="$bin:$PATH"
export OMP_NUM_THREADS=1        # ranks share the cores
export TORCHDYNAMO_DISABLE=1    # nothing here is compiled; without this vLLM's first request builds C++
export TOKENIZERS_PARALLELISM=false

failed=()
check() {
    local name="$1"; shift
    echo "[test] $name: $*"
    "$@" || failed+=("$name (exit code $?)")
}

if [ $# = 0 ]; then
    check style ruff check .
    check floors lint-imports
    check tests python -m pytest -n 2
else
    check tests python -m pytest "$@"
fi

if [ ${#failed[@]} = 0 ]; then
    echo "VERDICT: PASSED"
else
    echo "VERDICT: FAILED: $(IFS=,; echo "${failed[*]}")"
    exit 1
fi
