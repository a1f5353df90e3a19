"""The whole configuration: one dataclass per TOML section.

The string under a field is its only help text (`train.py --help` prints it). Names are torchtitan's where the thing is
the same; [packing], [context_parallel] and [cost_model] are ours. `config_manager.py` reads and checks them. Degrees
and counts of -1 mean "resolved at start", as the help text says.
"""

import math
from dataclasses import dataclass, field
from typing import Literal


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, in one message."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(["The configuration cannot run:", *(f"  - {p}" for p in problems)]))


@dataclass
class Job:
    config_file: str = ""
    """TOML recipe to read; flags on the command line win over it."""
    dump_folder: str = "outputs"
    """Folder of this run: metrics.jsonl, checkpoints, traces, TensorBoard files."""
    description: str = ""
    """Free text, printed at the start."""


@dataclass
class Model:
    flavor: str = "debugmodel"
    """Model size: a key of `llama_configs` in torchtitan_wlb/models/llama.py."""
    tokenizer: str = "bytes"
    """`bytes` (every UTF-8 byte is a token), a tiktoken encoding name, or the path of a tiktoken rank file such as
    Llama-3's tokenizer.model."""
    attention: Literal["auto", "sdpa", "varlen", "flash"] = "auto"
    """Attention kernel: sdpa (any device), varlen (ATen flash attention, CUDA), flash (the flash-attn package,
    CUDA)."""
    add_bos: bool = True
    """Put a begin-of-text token in front of every document."""
    add_eos: bool = True
    """Put an end-of-text token after every document."""


@dataclass
class Training:
    dataset: tuple[str, ...] = ("stdlib",)
    """Sources to train on, one or several: stdlib, stdlib_files, text, json, parquet, tokens, hf, synthetic (see
    torchtitan_wlb/data/sources.py)."""
    dataset_path: tuple[str, ...] = ()
    """For every source its path, glob, Hugging Face name or length distribution; empty for stdlib."""
    dataset_weight: tuple[float, ...] = ()
    """For every source its share of the tokens; empty means equal shares."""
    dataset_column: str = "text"
    """Text column of json, parquet and hf sources (a column of token ids for `tokens`)."""
    loss_mask_column: str = ""
    """Column with one 0 or 1 per token; tokens marked 0 are context only, not targets. Only for `tokens` sources."""
    dataset_cache: str = ".cache/torchtitan_wlb"
    """Folder of the tokenised, memory-mapped documents."""
    seq_len: int = 4096
    """Context window in tokens: no document is longer."""
    long_documents: Literal["split", "truncate", "drop"] = "split"
    """What happens to a document longer than the context window. Counted and logged."""
    seq_len_multiple: int = -1
    """Micro-batch lengths are rounded up to a multiple of this, so that few distinct shapes occur. -1: the largest
    power of two up to a 128th of the context window that divides it (padding is half of that: 0.4%)."""
    steps: int = 100
    """Optimizer steps of the run (counted from the first start)."""
    epochs: int = 0
    """Passes over the data after which training ends, queues flushed; 0 means endless."""
    global_batch_size: int = -1
    """Micro-batches per optimizer step over all ranks (N). -1: data-parallel degree x micro-batches the pipeline
    schedule needs (the paper's PP x DP for 1F1B)."""
    max_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 switches clipping off."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of parameters and activations in forward and backward."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type of the gradient reduction."""
    loss_chunk_size: int = 1024
    """Tokens whose logits exist at the same time."""
    num_workers: int = 1
    """Loader processes that plan and build steps ahead; 0 does it between the steps."""
    gc_freq: int = 50
    """Steps between Python garbage collections (they stall all ranks, so all collect at the same step)."""

    @property
    def length_multiple(self) -> int:
        """seq_len_multiple, -1 resolved."""
        if self.seq_len_multiple != -1:
            return self.seq_len_multiple
        return math.gcd(self.seq_len, 1 << max(0, self.seq_len.bit_length() - 8))


@dataclass
class Packing:
    strategy: Literal["plain", "plain_whole", "fixed", "fixed_solver", "wlb_paper", "wlb"] = "wlb"
    """How documents become micro-batches. plain: concatenate and cut at the window. plain_whole: documents whole, next
    fit, padded tail.
    fixed, fixed_solver: repacked into sequences of fixed length, greedily or by an integer program. wlb_paper:
    Algorithm 1 of WLB-LLM.
    wlb: ours."""
    max_len_factor: float = 1.5
    """S_max / seq_len: no micro-batch of wlb and wlb_paper is longer. Set by memory; always wins over balance."""
    max_tokens_in_flight: int = 0
    """wlb: tokens that as many micro-batches as there are pipeline stages (those alive at once under 1F1B) may hold
    together; 0: no limit besides S_max."""
    delay_price: float | Literal["auto"] = "auto"
    """wlb: linear work of how many tokens ending one step of waiting of one token is worth; lower is better balanced
    and later. auto: found at the first step on the documents, for target_delay."""
    target_delay: float = 0.45
    """Mean delay in steps that auto aims at."""
    max_delay_steps: int = 15
    """wlb: a document that has waited so long leaves, whatever it does to the balance."""
    outlier_thresholds: tuple[int, ...] | Literal["auto"] = "auto"
    """wlb_paper: lengths L_1 < L_2 < ... in tokens; documents of L_i to L_(i+1) wait in queue i until it holds N of
    them. auto: the best balance on the documents within target_delay, found at the first step."""
    window: int = 1
    """fixed, fixed_solver: global batches that are repacked together."""
    solver_nodes: int = 10
    """fixed_solver: nodes that the integer program may search a step (a time limit would not be the same on all
    ranks)."""


@dataclass
class ContextParallel:
    sharding: Literal["per_sequence", "per_document", "hybrid", "adaptive"] = "adaptive"
    """How a micro-batch is cut over context-parallel ranks. per_sequence: the packed sequence into 2 CP pieces.
    per_document: every document into 2 CP chunks. hybrid: long documents over as many ranks as they need, the others
    whole. adaptive: whichever of the three is predicted fastest, for every micro-batch."""
    recompute_kv: bool = False
    """Exchange keys and values again in backward instead of keeping those received: less memory, more traffic."""


@dataclass
class CostModel:
    device: Literal["auto", "cpu", "h100", "h200"] = "auto"
    """Device whose rates the analytic workload model uses. Frozen at the first step of a run."""
    profile: str = ""
    """JSON of scripts/profile_costs.py: measured costs instead of analytic ones. Frozen at the first step of a run."""


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model (HSDP)."""
    data_parallel_shard_degree: int = -1
    """FSDP2 ranks with documents of their own; -1: all ranks that are left."""
    tensor_parallel_degree: int = 1
    """Ranks that share every matrix product (DTensor, with sequence parallelism)."""
    context_parallel_degree: int = 1
    """Ranks that share every micro-batch."""
    pipeline_parallel_degree: int = 1
    """Ranks that share the layers."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Schedule of torch.distributed.pipelining. InterleavedZeroBubble, ZBVZeroBubble and DualPipeV split backward, but
    not with activation checkpointing."""
    pipeline_parallel_stages_per_rank: int = 2
    """Stages a rank of Interleaved1F1B, LoopedBFS and InterleavedZeroBubble (ZBVZeroBubble and DualPipeV have two)."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after forward; default: yes without pipelining, no with it."""


@dataclass
class Optimizer:
    name: Literal["AdamW", "SGD"] = "AdamW"
    """Optimizer of torch.optim."""
    lr: float = 3e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.95
    """AdamW: decay of the second moment."""
    eps: float = 1e-8
    """AdamW: added to the denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors (norms) are not decayed."""
    momentum: float = 0.0
    """SGD: momentum."""


@dataclass
class LRScheduler:
    warmup_steps: int = 10
    """Steps of linear warm-up."""
    decay_type: Literal["linear", "cosine", "sqrt"] = "cosine"
    """Shape of the decay."""
    decay_ratio: float = 1.0
    """Share of the steps, at the end, over which the rate decays; what is between warm-up and decay is constant."""
    min_lr_factor: float = 0.1
    """Rate at the last step / peak rate."""


@dataclass
class ActivationCheckpoint:
    mode: Literal["none", "selective", "full"] = "none"
    """Recompute activations in backward: of no block, of every n-th, of all."""
    selective_every: int = 2
    """Selective: every n-th block is recomputed."""

    @property
    def recomputed(self) -> float:
        """Share of the blocks whose forward runs again in backward."""
        return {"none": 0.0, "selective": 1 / self.selective_every, "full": 1.0}[self.mode]


@dataclass
class Compile:
    enable: bool = False
    """torch.compile every transformer block with dynamic sequence length (attention itself stays eager)."""


@dataclass
class Checkpoint:
    enable: bool = False
    """Save checkpoints, and resume from the newest complete one in the folder."""
    folder: str = "checkpoint"
    """Folder under job.dump_folder."""
    interval: int = 500
    """Steps between checkpoints; the last step is always saved."""
    load_step: int = -1
    """Step to resume from; -1: the newest complete one."""
    keep_latest_k: int = 10
    """Older checkpoints are deleted; 0 keeps all."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """async: write from a background thread while training goes on."""


@dataclass
class Metrics:
    log_freq: int = 10
    """Steps between log lines; metrics.jsonl gets a line whenever the console does."""
    time_micro_batches: bool = False
    """Time every micro-batch on every rank and log imbalance_measured beside the predicted one (on CUDA the host then
    waits for the device in every step)."""
    enable_tensorboard: bool = False
    """Write TensorBoard events under job.dump_folder/tb."""
    enable_wandb: bool = False
    """Log to Weights & Biases (WANDB_MODE=offline works)."""
    wandb_project: str = "torchtitan_wlb"
    """Weights & Biases project."""
    enable_color: bool = True
    """Coloured console columns."""


@dataclass
class Profiling:
    enable_profiling: bool = False
    """Chrome traces of some steps through torch.profiler."""
    save_traces_folder: str = "profile_traces"
    """Folder under job.dump_folder."""
    profile_freq: int = 10
    """Steps between traces."""
    enable_memory_snapshot: bool = False
    """Record CUDA allocations and write a snapshot when training ends or fails."""


@dataclass
class Comm:
    init_timeout_seconds: int = 300
    """Time limit of collectives up to the end of the first step."""
    train_timeout_seconds: int = 100
    """Time limit of collectives afterwards."""


@dataclass
class Validation:
    enable: bool = False
    """Evaluate between steps."""
    dataset: tuple[str, ...] = ()
    """Source(s) of the validation documents."""
    dataset_path: tuple[str, ...] = ()
    """Their paths."""
    freq: int = 100
    """Steps between evaluations."""
    steps: int = 10
    """Validation steps at most; the pass ends before when the documents do."""


@dataclass
class Debug:
    seed: int = 0
    """Seed of initial weights and document order."""
    deterministic: bool = False
    """Deterministic kernels only."""


@dataclass
class JobConfig:
    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    packing: Packing = field(default_factory=Packing)
    context_parallel: ContextParallel = field(default_factory=ContextParallel)
    cost_model: CostModel = field(default_factory=CostModel)
    parallelism: Parallelism = field(default_factory=Parallelism)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    validation: Validation = field(default_factory=Validation)
    debug: Debug = field(default_factory=Debug)
