#!/usr/bin/env bash
# One machine: NGPU=8 CONFIG=train_configs/F.toml bash scripts/run_train.sh [--section.key value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/cuda_env.sh
NGPU=${NGPU:-8}
CONFIG=${CONFIG:-train_configs/debug_cpu.toml}
exec torchrun --standalone --nproc-per-node "$NGPU" train.py --job.config_file "$CONFIG" "$@"
