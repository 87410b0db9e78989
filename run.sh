#!/usr/bin/env bash
# Plans and trains on 1 GPU. Further settings go to both: bash run.sh --max_steps 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

megatron-grpo plan --config config.yaml --world_size 1 --gpu_memory_gb 80 "$@"
exec torchrun --standalone --nproc_per_node 1 --shutdown-timeout 300 -m megatron_grpo train --config config.yaml "$@"
