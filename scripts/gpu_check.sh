#!/usr/bin/env bash
# On one GPU, in under 7 minutes, with torch (2.11 or newer) and numpy only: kernel parity, the latency grid, and the ranks of each shard plan.
# Results go to the folder given as first argument (default: assets/results).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "${1:-assets/results}"
exec env PYTHONPATH="$PWD" python3 scripts/gpu_check.py --out "${1:-assets/results}/gpu_check.json"
