#!/usr/bin/env bash
# Train a tiny model through an agent's endpoint: make data and model, evaluate, train, evaluate again, and check the result. Existing files
# are reused. Arguments are settings of the training run and override config.yaml:
#
#   bash examples/agent/run.sh
#   bash examples/agent/run.sh --lr 3e-4 --seed 1
#   AGAIN=1 bash examples/agent/run.sh               train again even if nothing has changed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/agent output=output/agent
source examples/steps.sh

echo "[agent] 1/5 environment"
install plot  # vLLM depends on the openai client

echo "[agent] 2/5 data and model"
python tools/make_tiny_chat_model.py examples/calculator
for part in data model; do ln -sfn "../calculator/$part" "$here/$part"; done  # those of the calculator

before_and_after "$here/config.yaml $here/my_agent.py $here/solve.py examples/calculator/model/made_by.json" "[agent]" 100 "$@"

echo "[agent] 5/5 verdict"
python examples/judge_turns.py $output --before 0.5 --after 0.9 --curves episodes/turns agent/contexts
