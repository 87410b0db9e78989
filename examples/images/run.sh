#!/usr/bin/env bash
# Train a tiny Qwen2.5-VL on questions about images, from a clean clone: install the environment, draw the images, make the model and warm
# it up with mostly wrong answers, train vision tower, aligner and language model with GRPO, and check the result on held-out images.
# Existing files are reused. Arguments are settings of the training run and override config.yaml:
#
#   bash examples/images/run.sh
#   bash examples/images/run.sh --freeze_vit true --freeze_aligner true
#   AGAIN=1 bash examples/images/run.sh                   train again even if nothing has changed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/images output=output/images
source examples/steps.sh

echo "[images] 1/4 environment"
install plot images

echo "[images] 2/4 images and model"
python $here/make_data.py
python tools/make_tiny_vlm.py

train "$here/config.yaml $here/reward.py $here/model/made_by.json" "[images] 3/4" "$@"

echo "[images] 4/4 verdict"
python $here/verdict.py $output $here/model $here/data
