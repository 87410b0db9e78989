#!/usr/bin/env bash
# The quickstart, from a clean clone to a trained model: installs what is missing, makes a tiny model and its data, trains, and judges the
# run. What is there already is reused. Arguments are settings of the training run and win over config.yaml:
#
#   bash examples/quickstart/run.sh
#   bash examples/quickstart/run.sh --lr 1e-4 --seed 1
#   AGAIN=1 bash examples/quickstart/run.sh               train again although nothing has changed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/quickstart output=output/quickstart

echo "[quickstart] 1/4 environment"
bin="$(bash tools/install.sh plot)" || { echo "VERDICT: FAILED: the install did not finish, see above"; exit 1; }
export PATH="$bin:$PATH"
export OMP_NUM_THREADS=1  # a rank, whatever the shell says: threads of a tiny model wait for each other where the cores are busy

echo "[quickstart] 2/4 data and model"
python $here/make_data.py
python tools/make_tiny_model.py

# Everything that decides how the run goes: a run that finished with the same is not repeated.
key="$({ cat $here/config.yaml $here/reward.py $here/model/made_by.json; find megatron_grpo -name '*.py' | LC_ALL=C sort | xargs cat
         echo "$@"; } | python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
if [ -z "${AGAIN:-}" ] && [ "$(cat $output/finished_with 2>/dev/null)" = "$key" ]; then
    echo "[quickstart] 3/4 training: $output is a finished run of just this; kept (AGAIN=1 trains again)"
else
    ranks=2
    gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"  # none counts 0, which grep calls a failure
    if [ "$gpus" = 1 ]; then ranks=1; fi  # each rank needs a GPU of its own
    echo "[quickstart] 3/4 training: torchrun --nproc_per_node $ranks -m megatron_grpo train --config $here/config.yaml $*"
    torchrun --nproc_per_node $ranks -m megatron_grpo train --config $here/config.yaml --output_dir $output "$@" ||
        { code=$?; echo "VERDICT: FAILED: the training run ended with exit code $code, see above"; exit 1; }
    echo "$key" >$output/finished_with
fi

echo "[quickstart] 4/4 verdict"
python $here/verdict.py $output
