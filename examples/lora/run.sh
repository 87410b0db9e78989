#!/usr/bin/env bash
# Train the quickstart's model with LoRA, from a clean clone: run the quickstart (which makes the model and the data) unless it has run,
# train an adapter on the same task, score the exported adapter with PEFT, and compare both runs. Existing files are reused. Arguments are
# settings of the LoRA run and override config.yaml:
#
#   bash examples/lora/run.sh
#   bash examples/lora/run.sh --lora_rank 4 --lr 1e-2
#   AGAIN=1 bash examples/lora/run.sh                     train both again even if nothing has changed
#   RANKS=2 bash examples/lora/run.sh                     train both on two ranks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/lora output=output/lora RANKS="${RANKS:-1}"
source examples/steps.sh

echo "[lora] 1/4 environment"
install plot peft

echo "[lora] 2/4 quickstart: model, data, and the run of all weights (reused if output/quickstart is that run)"
bash examples/quickstart/run.sh 2>&1 | sed -u 's/^VERDICT: /[quickstart] verdict: /' ||
    failed "the quickstart did not pass"

train "$here/config.yaml examples/quickstart/reward.py examples/quickstart/model/made_by.json" "[lora] 3/4" "$@"

echo "[lora] 4/4 PEFT answers the held-out prompts; verdict"
python $here/verdict.py $output output/quickstart
