#!/usr/bin/env bash
# Set-up, then the main job on real text: a debug model on the Python standard library, PP=2 x CP=2 in 4 CPU processes,
# 30 steps. Under 3 minutes after the install on 2 cores. Further flags go to train.py; --job.config_file takes another
# recipe for 4 processes. Ends with a picture of the run in its job.dump_folder.
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
# One thread a rank: four ranks share the cores.
export OMP_NUM_THREADS=1
# Freed memory stays with the process: glibc would give large blocks back, and every new one would cost page faults.
export MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000
case " $*" in
*" --job.config"[_-]"file"*) ;;
*) set -- --job.config_file train_configs/debug_cpu.toml "$@" ;;
esac
torchrun --nproc-per-node 4 train.py "$@"
python scripts/plot_run.py --ranks 4 "$@"
