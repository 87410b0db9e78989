#!/usr/bin/env bash
# Run the quickstart from a clean clone: install the environment, make the data and a tiny model, train, and check the result. Existing
# files are reused. Arguments are settings of the training run and override config.yaml:
#
#   bash examples/quickstart/run.sh
#   bash examples/quickstart/run.sh --lr 1e-4 --seed 1
#   AGAIN=1 bash examples/quickstart/run.sh               train again even if nothing has changed
#   RANKS=2 bash examples/quickstart/run.sh               train on two ranks; one is as fast for this model
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/quickstart output=output/quickstart RANKS="${RANKS:-1}"
source examples/steps.sh

echo "[quickstart] 1/5 environment"
install plot

echo "[quickstart] 2/5 data and model"
python $here/make_data.py
python tools/make_tiny_model.py

train "$here/config.yaml $here/reward.py $here/model/made_by.json" "[quickstart] 3/5" "$@"

echo "[quickstart] 4/5 report"
python -m megatron_grpo report $output || failed "the report was not written"
echo "[quickstart] 5/5 verdict"
python $here/verdict.py $output
