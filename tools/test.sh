#!/usr/bin/env bash
# Install what is missing, then run all checks of the project: style, types, layers, sizes, links of the site, and tests. With arguments,
# only pytest runs, with these arguments:
#
#   bash tools/test.sh                                    everything
#   bash tools/test.sh tests/unit -k advantages           some tests
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Tests of the page that `report` writes need a browser, which is installed in parallel with the packages.
install_browser() {
    command -v chromium >/dev/null ||
        { [ "$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1 ||
        echo "[test] no browser: tests of the report's page are skipped (apt-get install chromium)"
}
install_browser & browser=$!

bin="$(bash tools/install.sh dev data math plot tensorboard)" || { echo "TESTS NOT RUN: the install failed, see above."; exit 1; }
export PATH="$bin:$PATH"
export OMP_NUM_THREADS=1        # ranks share the cores
export TORCHDYNAMO_DISABLE=1    # otherwise vLLM's first request compiles C++
export TOKENIZERS_PARALLELISM=false

# The newest supported megatron-core cannot be installed next to the oldest one, and has no wheel for Python 3.11. Its modules are unpacked
# into a folder that some tests put on their path.
fetch_newest_core() {
    local version=0.19.2 folder
    folder="$(dirname "$bin")/megatron-core-$version"
    if [ ! -d "$folder" ]; then
        rm -rf "$folder.new"
        python -m pip download "megatron-core==$version" --no-deps --python-version 3.12 --only-binary=:all: --quiet --dest "$folder.new" &&
            python -m zipfile -e "$folder.new"/*.whl "$folder.new/unpacked" && mv "$folder.new/unpacked" "$folder"
        rm -rf "$folder.new"
    fi
    if [ -d "$folder" ] && ! python -m pip show megatron-core | grep -q "^Version: $version$"; then
        export MEGATRON_GRPO_EXTRA_CORE="$folder"
    else
        echo "[test] megatron-core $version is installed already or cannot be fetched: tests/distributed/test_newer_core.py is skipped"
    fi
}

# Third-party agents and environments need other versions of packages than those installed: a folder that one test puts on its path.
fetch_agent_packages() {
    local list=tools/agent_packages.txt folder
    folder="$(dirname "$bin")/agent-packages-$(sha256sum "$list" | cut -c1-8)"
    if [ ! -d "$folder" ]; then
        rm -rf "$folder.new"
        python -m pip install --no-deps --no-compile -qq --target "$folder.new" --requirement "$list" && mv "$folder.new" "$folder"
        rm -rf "$folder.new"
    fi
    if [ -d "$folder" ]; then
        export MEGATRON_GRPO_EXTRA_AGENTS="$folder"
    else
        echo "[test] the packages of $list cannot be fetched: tests/unit/environments/agents_of_others.py is skipped"
    fi
}

failed=()
check() {
    local name="$1"; shift
    echo "[test] $name: $*"
    "$@" || failed+=("$name (exit code $?)")
}

# Static checks.
check_files() {
    check style ruff check .
    check format ruff format --check .
    check types mypy
    check layers lint-imports
    check size python -m tests.size_ledger
    check site bash tools/docs.sh
    [ ${#failed[@]} = 0 ] || { echo "[test] failed: $(IFS=,; echo "${failed[*]}")"; return 1; }
}

if [ $# = 0 ]; then
    fetch_newest_core
    fetch_agent_packages
    wait "$browser"
    report="$(mktemp)"
    check_files >"$report" 2>&1 & files=$!  # in parallel with the tests
    check tests python -m pytest -n 2
    wait "$files" || failed+=("style, format, types, layers, size or site")
    cat "$report"
    rm "$report"
else
    wait "$browser"
    check tests python -m pytest "$@"
fi

if [ ${#failed[@]} = 0 ]; then
    echo "VERDICT: PASSED"
else
    echo "VERDICT: FAILED: $(IFS=,; echo "${failed[*]}")"
    exit 1
fi
