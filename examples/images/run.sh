#!/usr/bin/env bash
# Pictures, from a clean clone to a model that looks: installs what is missing, draws pictures, makes a tiny Qwen2.5-VL from random weights
# that echoes questions and confuses left and right, trains it by GRPO (vision tower, aligner and text model), and judges the run on
# pictures it never saw.
# What is there already is reused. Arguments are settings of the training run and win over config.yaml:
#
#   bash examples/images/run.sh
#   bash examples/images/run.sh --freeze_vit true --freeze_aligner true
#   AGAIN=1 bash examples/images/run.sh                   train again although nothing has changed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/images output=output/images
source examples/steps.sh

echo "[images] 1/4 environment"
install plot images

echo "[images] 2/4 pictures and model"
python $here/make_data.py
python tools/make_tiny_vlm.py

train "$here/config.yaml $here/reward.py $here/model/made_by.json" "[images] 3/4" "$@"

echo "[images] 4/4 verdict"
python $here/verdict.py $output $here/model $here/data
