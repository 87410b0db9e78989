#!/usr/bin/env bash
# Train a tiny model to call a calculator: make data and model, evaluate, train, evaluate again, and check the result. Existing files are
# reused. Arguments are settings of the training run and override config.yaml:
#
#   bash examples/calculator/run.sh
#   bash examples/calculator/run.sh --lr 3e-4 --seed 1
#   AGAIN=1 bash examples/calculator/run.sh               train again even if nothing has changed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/calculator output=output/calculator
source examples/steps.sh

echo "[calculator] 1/5 environment"
install plot

echo "[calculator] 2/5 data and model"
python tools/make_tiny_chat_model.py $here

before_and_after "$here/config.yaml $here/tool.py $here/model/made_by.json" "[calculator]" 100 "$@"

echo "[calculator] 5/5 verdict"
python examples/judge_turns.py $output --before 0.5 --after 0.9 --curves environment/tool_calls environment/tool_errors
