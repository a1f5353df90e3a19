# Sourced by run_train.sh and multinode_trainer.slurm: settings of CUDA and NCCL for this kind of training. What is set
# already is kept.

# Micro-batches differ in length: without it the allocator keeps blocks of sizes that do not come again.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Hardware queues: enough for compute, FSDP's gathers and reductions, and both directions of the pipeline side by side.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
# A rank that fails ends the job instead of leaving the others in a collective.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
# Tensors of collectives are held until they are done, not marked as used by another stream, which delays their reuse.
export TORCH_NCCL_AVOID_RECORD_STREAMS=${TORCH_NCCL_AVOID_RECORD_STREAMS:-1}
