#!/usr/bin/env bash
# LoRA, from a clean clone to an adapter that PEFT loads: the quickstart's model, data and run (made if they are not there), the same run
# with adapters in place of all weights, PEFT's own score of the adapter, and a verdict. What is there already is reused. Arguments are
# settings of the LoRA run and win over config.yaml:
#
#   bash examples/lora/run.sh
#   bash examples/lora/run.sh --lora_rank 4 --lr 1e-2
#   AGAIN=1 bash examples/lora/run.sh                     train both again although nothing has changed
#   RANKS=2 bash examples/lora/run.sh                     train both on two ranks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/lora output=output/lora RANKS="${RANKS:-1}"
source examples/steps.sh

echo "[lora] 1/4 environment"
install plot peft

echo "[lora] 2/4 the quickstart: model, data, and the run of all weights to compare with (trained now unless output/quickstart is it)"
bash examples/quickstart/run.sh 2>&1 | sed -u 's/^VERDICT: /[quickstart] verdict: /' ||
    failed "the quickstart, which LoRA is compared with, did not pass"

train "$here/config.yaml examples/quickstart/reward.py examples/quickstart/model/made_by.json" "[lora] 3/4" "$@"

echo "[lora] 4/4 PEFT answers the held-out prompts; verdict"
python $here/verdict.py $output output/quickstart
