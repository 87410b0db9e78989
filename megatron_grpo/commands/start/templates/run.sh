#!/usr/bin/env bash
# Plans and trains on {gpus} GPU{s}. Further settings go to both: bash run.sh --max_steps 20
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"

megatron-grpo plan --config config.yaml --world_size {gpus} --gpu_memory_gb {memory} "$@"
exec torchrun --standalone --nproc_per_node {gpus} --shutdown-timeout 300 -m megatron_grpo train --config config.yaml "$@"
