#!/usr/bin/env bash
# A tiny model learns to play a game in four turns: makes data and model, evaluates, trains, evaluates again, and judges. What is there already is
# reused. Arguments are settings of the training run and win over config.yaml:
#
#   bash examples/guessing/run.sh
#   bash examples/guessing/run.sh --lr 3e-4 --seed 1
#   AGAIN=1 bash examples/guessing/run.sh               train again although nothing has changed
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
