"""Sections that say how a run goes: job, optimizer and its rate, activation_checkpoint, compile, checkpoint, metrics,
profiling, comm, validation, debug.
"""

from typing import Annotated, Literal

from pydantic import Field

from torchtitan_wlb.config_types import (
    Count,
    CountOrOp,
    Decay,
    Natural,
    NonNegative,
    Section,
    Several,
)


class Job(Section):
    config_file: str = ""
    """TOML recipe to read; flags on the command line win over it."""
    dump_folder: str = "outputs"
    """Folder of this run: metrics.jsonl, checkpoints, traces, TensorBoard files."""
    description: str = ""
    """Free text, printed at the start."""
    print_args: bool = False
    """Log the whole configuration at the start."""


class Optimizer(Section):
    name: Literal["AdamW", "SGD"] = "AdamW"
    """Optimizer of torch.optim."""
    lr: NonNegative = 3e-4
    """Peak learning rate."""
    fused: bool = True
    """AdamW: update all parameters in one kernel."""
    beta1: Decay = 0.9
    """AdamW: decay of the first moment."""
    beta2: Decay = 0.95
    """AdamW: decay of the second moment."""
    eps: NonNegative = 1e-8
    """AdamW: added to the denominator."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of matrices; vectors (norms) are not decayed."""
    momentum: Decay = 0.0
    """SGD: momentum."""


class LRScheduler(Section):
    steps: Natural = 0
    """Steps of the whole schedule; 0: training.steps. Set it to stop a run early, or to extend one, on the same
    schedule."""
    warmup_steps: Natural = 10
    """Steps of linear warm-up."""
    decay_type: Literal["linear", "cosine", "sqrt"] = "cosine"
    """Shape of the decay."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the steps, at the end, over which the rate decays; what is between warm-up and decay is constant."""
    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Rate at the last step / peak rate."""


class ActivationCheckpoint(Section):
    mode: Literal["none", "selective", "full"] = "none"
    """Compute activations again in backward: none, some (selective_ac_option says which), or all but the output of
    attention, which costs far more time than it takes memory."""
    selective_ac_option: CountOrOp = "op"
    """Selective: `op` keeps matrix products and attention with its exchange and repeats the cheap rest (norms, rotary
    positions, activation function, gathers of tensor parallelism); a number n is `full` in every n-th block."""

    @property
    def kept(self) -> str | int:
        """`none`, `op`, `full`, or n for `full` in every n-th block (parallelize_llama.apply_ac)."""
        return self.selective_ac_option if self.mode == "selective" else self.mode


class Compile(Section):
    enable: bool = False
    """torch.compile every transformer block with dynamic sequence length (attention is one operator in it)."""
    backend: Literal["inductor", "aot_eager_decomp_partition", "aot_eager", "eager"] = "inductor"
    """Backend of torch.compile. All but inductor run the traced graphs without generating code: to look for a fault."""


class Checkpoint(Section):
    enable: bool = False
    """Save checkpoints, and resume from the newest complete one in the folder."""
    folder: str = "checkpoint"
    """Folder under job.dump_folder."""
    interval: Count = 500
    """Steps between checkpoints; the last step is always saved."""
    initial_load_path: str = ""
    """Weights of a fresh run: a Hugging Face folder (*.safetensors), or a checkpoint folder step-N of ours. Not used
    once the run has a checkpoint of its own."""
    load_step: int = -1
    """Step to resume from; -1: the newest complete one."""
    keep_latest_k: Natural = 10
    """Older checkpoints are deleted; 0 keeps all."""
    exclude_from_loading: Several[Literal["optimizer", "dataloader"]] = ()
    """What a resumed run does not take from the checkpoint: `optimizer` (its state starts anew), `dataloader` (the
    documents start from the first one, packed as configured)."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: write from a background thread while training goes on."""


class Metrics(Section):
    log_freq: Count = 10
    """Steps between log lines; metrics.jsonl gets a line whenever the console does."""
    time_micro_batches: bool = False
    """Time every micro-batch on every rank and log imbalance_measured beside the predicted one (on CUDA the host then
    waits for the device in every step)."""
    enable_tensorboard: bool = False
    """Write TensorBoard events."""
    save_tb_folder: str = "tb"
    """Folder of the TensorBoard events under job.dump_folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases (WANDB_MODE=offline works)."""
    wandb_project: str = "torchtitan_wlb"
    """Weights & Biases project."""
    enable_color: bool = True
    """Coloured console columns."""


class Profiling(Section):
    enable_profiling: bool = False
    """Chrome traces of some steps through torch.profiler."""
    save_traces_folder: str = "profile_traces"
    """Folder under job.dump_folder."""
    profile_freq: Count = 10
    """Steps between traces."""
    enable_memory_snapshot: bool = False
    """Record CUDA allocations and write a snapshot when training ends or fails."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the snapshots under job.dump_folder."""


class Comm(Section):
    init_timeout_seconds: Count = 300
    """Time limit of collectives up to the end of the first step."""
    train_timeout_seconds: Count = 100
    """Time limit of collectives afterwards."""
    trace_buf_size: Natural = 20_000
    """Collectives that NCCL's flight recorder remembers for the report after a time-out; 0: none."""


class Validation(Section):
    enable: bool = False
    """Evaluate between steps."""
    dataset: Several[str] = ()
    """Source(s) of the validation documents."""
    dataset_path: Several[str] = ()
    """Their paths."""
    dataset_name: Several[str] = ()
    """Their names; sources of one name are one set, with a loss of its own. Empty: all are one set."""
    dataset_column: Several[str] = ("text",)
    """As training.dataset_column."""
    dataset_format: Several[Literal["text", "messages"]] = ("text",)
    """As training.dataset_format."""
    dataset_config: Several[str] = ("",)
    """As training.dataset_config."""
    dataset_split: Several[str] = ("train",)
    """As training.dataset_split."""
    loss_mask_column: str = ""
    """As training.loss_mask_column."""
    freq: Count = 100
    """Steps between evaluations."""
    steps: Natural = 10
    """Steps of a set at most; the pass ends before when the documents do. 0: all documents."""


class Debug(Section):
    seed: Natural = 0
    """Seed of initial weights and document order."""
    deterministic: bool = False
    """Deterministic kernels only."""
