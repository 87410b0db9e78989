#!/usr/bin/env bash
# LoRA, from a clean clone to an adapter that PEFT loads: the quickstart's model, data and run (made if they are not there), the same run
# with adapters in place of all weights, PEFT's own score of the adapter, and a verdict. What is there already is reused. Arguments are
# settings of the LoRA run and win over config.yaml:
#
#   bash examples/lora/run.sh
#   bash examples/lora/run.sh --lora_rank 4 --lr 1e-2
#   AGAIN=1 bash examples/lora/run.sh                     train both again although nothing has changed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/lora output=output/lora

echo "[lora] 1/4 environment"
bin="$(bash tools/install.sh plot peft)" || { echo "VERDICT: FAILED: the install did not finish, see above"; exit 1; }
export PATH="$bin:$PATH"
export OMP_NUM_THREADS=1  # a rank, whatever the shell says: threads of a tiny model wait for each other where the cores are busy

echo "[lora] 2/4 the quickstart: model, data, and the run of all weights to compare with (trained now unless output/quickstart is it)"
bash examples/quickstart/run.sh 2>&1 | sed -u 's/^VERDICT: /[quickstart] verdict: /' ||
    { echo "VERDICT: FAILED: the quickstart, which LoRA is compared with, did not pass, see above"; exit 1; }

# Everything that decides how the run goes: a run that finished with the same is not repeated.
key="$({ cat $here/config.yaml examples/quickstart/reward.py examples/quickstart/model/made_by.json
         find megatron_grpo -name '*.py' | LC_ALL=C sort | xargs cat
         echo "$@"; } | python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
if [ -z "${AGAIN:-}" ] && [ "$(cat $output/finished_with 2>/dev/null)" = "$key" ]; then
    echo "[lora] 3/4 training: $output is a finished run of just this; kept (AGAIN=1 trains again)"
else
    ranks=2
    gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"  # none counts 0, which grep calls a failure
    if [ "$gpus" = 1 ]; then ranks=1; fi  # each rank needs a GPU of its own
    echo "[lora] 3/4 training: torchrun --nproc_per_node $ranks -m megatron_grpo train --config $here/config.yaml $*"
    torchrun --nproc_per_node $ranks -m megatron_grpo train --config $here/config.yaml --output_dir $output "$@" ||
        { code=$?; echo "VERDICT: FAILED: the training run ended with exit code $code, see above"; exit 1; }
    echo "$key" >$output/finished_with
fi

echo "[lora] 4/4 PEFT answers the held-out prompts; verdict"
python $here/verdict.py $output output/quickstart
