#!/usr/bin/env bash
# Train a tiny model to find a number in four turns: make data and model, evaluate, train, evaluate again, and check the result. Existing
# files are reused. Arguments are settings of the training run and override config.yaml:
#
#   bash examples/guessing/run.sh
#   bash examples/guessing/run.sh --lr 3e-4 --seed 1
#   AGAIN=1 bash examples/guessing/run.sh               train again even if nothing has changed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/guessing output=output/guessing
source examples/steps.sh

echo "[guessing] 1/5 environment"
install plot

echo "[guessing] 2/5 data and model"
python tools/make_tiny_chat_model.py $here

before_and_after "$here/config.yaml $here/game.py $here/model/made_by.json" "[guessing]" 60 "$@"

echo "[guessing] 5/5 verdict"
python examples/judge_turns.py $output --before 0.6 --after 0.85 --curves episodes/turns environment/found
