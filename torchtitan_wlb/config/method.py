"""Sections that say what is trained, and how it is packed and spread: model, training, packing, context_parallel,
cost_model, parallelism.
"""

import math
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from torchtitan_wlb.config_types import (
    Count,
    CountOrAuto,
    Natural,
    NonNegative,
    Section,
    Several,
    SeveralOrAuto,
)


class Model(Section):
    flavor: str = "debugmodel"
    """A key of `llama_configs` in torchtitan_wlb/models/model_args.py, or a folder with a config.json of Hugging Face
    (Llama, Mistral, Qwen2.5, Qwen3); its weights are loaded by checkpoint.initial_load_path."""
    rope_theta: NonNegative = 0.0
    """Base of the rotary frequencies; 0: the model's."""
    rope_scaling: Literal["model", "none", "linear", "llama3", "yarn"] = "model"
    """How rotary frequencies are stretched for long windows; model: as the flavor says."""
    rope_factor: Annotated[float, Field(ge=1)] = 8.0
    """linear, llama3, yarn: how many times."""
    rope_original_context: Count = 8192
    """llama3, yarn: the window that the model was trained for before."""
    tokenizer: str = "bytes"
    """`bytes` (every UTF-8 byte is a token), a tiktoken encoding name, or the path of a tokenizer.json, of a tiktoken
    rank file such as Llama-3's tokenizer.model, or of a Hugging Face folder with one of them."""
    tokenizer_pattern: str = ""
    """Expression that cuts text into words before the merges of a rank file; empty: Llama-3's, for its rank file."""
    chat_template: str = ""
    """Of conversations (training.dataset_format): chatml, llama3, the path of a .jinja file; empty: the one of the
    tokenizer's folder."""
    attention: Literal["auto", "sdpa", "varlen", "flash", "fa3", "fa4"] = "auto"
    """Attention kernel: sdpa (any device), varlen (ATen flash attention, CUDA), flash (the flash-attn package,
    CUDA)."""
    add_bos: bool = True
    """Put a begin-of-text token in front of every document."""
    add_eos: bool = True
    """Put an end-of-text token after every document."""
    bos_token: str = ""
    """Name of the begin-of-text token; empty: as the tokenizer's files say. A tokenizer without one adds none."""
    eos_token: str = ""
    """Name of the end-of-text token; empty: as the tokenizer's files say."""


class Training(Section):
    dataset: Several[str] = ("stdlib",)
    """Sources to train on, one or several: stdlib, stdlib_files, text, json (also compressed), parquet, arrow, hf,
    tokens, megatron, synthetic (see torchtitan_wlb/data/sources.py)."""
    dataset_path: Several[str] = ()
    """For every source its path, glob, Hugging Face name or length distribution; empty for stdlib."""
    dataset_weight: Several[PositiveFloat] = ()
    """For every source its share of the tokens; empty means equal shares."""
    dataset_column: Several[str] = ("text",)
    """Text column of json, parquet, arrow and hf sources, or a template over columns such as "{title}: {text}"; the
    conversations of messages; token ids of `tokens`. One for all sources, or one each."""
    dataset_format: Several[Literal["text", "messages"]] = ("text",)
    """What the column holds; messages: conversations, of which what the assistant says is learnt (model.chat_template).
    One for all sources, or one each."""
    dataset_config: Several[str] = ("",)
    """Of hf sources: configuration of the dataset. One for all sources, or one each."""
    dataset_split: Several[str] = ("train",)
    """Of hf sources: split of the dataset. One for all sources, or one each."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """What a row that cannot be read does (broken JSON, no such column, another type). skip: it is counted, the first
    ones are named."""
    prepare_processes: CountOrAuto = -1
    """Processes that tokenise; -1: as many as the job has processors."""
    loss_mask_column: str = ""
    """Column with one 0 or 1 per token; tokens marked 0 are context only, not targets. Only for `tokens` sources."""
    dataset_cache: str = ".cache/torchtitan_wlb"
    """Folder of the tokenised, memory-mapped documents."""
    seq_len: Annotated[int, Field(ge=2, le=2**26)] = 4096
    """Context window in tokens: no document is longer."""
    long_documents: Literal["split", "truncate", "drop"] = "split"
    """What happens to a document longer than the context window. Counted and logged."""
    seq_len_multiple: CountOrAuto = -1
    """Micro-batch lengths are rounded up to a multiple of this, so that few distinct shapes occur. -1: the largest
    power of two up to a 128th of the context window that divides it (padding is half of that: 0.4%)."""
    steps: Count = 100
    """Optimizer steps of the run (counted from the first start)."""
    epochs: Natural = 0
    """Passes over the data after which training ends, queues flushed; 0 means endless."""
    global_batch_size: CountOrAuto = -1
    """Micro-batches per optimizer step over all ranks (N). -1: data-parallel degree x pipeline degree, as in the paper
    (twice that for DualPipeV, which needs it)."""
    micro_batch_tokens: CountOrAuto | Literal["auto"] = -1
    """Mean tokens of a micro-batch; a step draws global_batch_size x as many. -1: training.seq_len. Smaller ones shrink
    the bubble of a pipeline (wlb and wlb_paper; long documents still fit, up to packing.max_len_factor). auto: each of
    the global_batch_size windows of tokens is split into 1 to 8 micro-batches, as many as are predicted fastest within
    packing.target_delay."""
    max_skipped_steps: Count = 10
    """A step whose gradient is not finite changes no weight; after so many in a row the run ends with an error."""
    max_norm: NonNegative = 1.0
    """Global gradient norm above which gradients are scaled down; 0 switches clipping off."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of parameters and activations in forward and backward."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type of the gradient reduction."""
    loss_chunk_size: CountOrAuto = -1
    """Tokens whose logits exist at the same time; -1: as many as make 128 MB."""
    num_workers: Annotated[int, Field(ge=0, le=64)] = 1
    """Threads that build steps ahead of the training loop; 0: the loop builds them itself."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (CUDA only)."""
    gc_freq: Count = 50
    """Steps between Python garbage collections (they stall all ranks, so all collect at the same step)."""

    def loss_chunk(self, vocab_rows: int) -> int:
        """loss_chunk_size, -1 resolved for a rank with some rows of the head."""
        return max(1, (128 << 20) // (4 * vocab_rows)) if self.loss_chunk_size == -1 else self.loss_chunk_size

    @property
    def length_multiple(self) -> int:
        """seq_len_multiple, -1 resolved."""
        if self.seq_len_multiple != -1:
            return self.seq_len_multiple
        return math.gcd(self.seq_len, 1 << max(0, self.seq_len.bit_length() - 8))


class Packing(Section):
    strategy: Literal["plain", "plain_whole", "fixed", "fixed_solver", "wlb_paper", "wlb"] = "wlb"
    """How documents become micro-batches. plain: concatenate and cut at the window. plain_whole: documents whole, next
    fit, padded tail. fixed, fixed_solver: repacked into sequences of fixed length, greedily or by an integer program.
    wlb_paper: Algorithm 1 of WLB-LLM. wlb: ours."""
    max_len_factor: Annotated[float, Field(ge=1, le=100)] = 1.5
    """S_max / seq_len: no micro-batch of wlb and wlb_paper is longer. Set by memory; always wins over balance."""
    max_tokens_in_flight: Natural = 0
    """wlb: limit for the tokens of as many micro-batches together as the pipeline's schedule has in memory at once (PP
    under 1F1B). 0: each is limited by max_len_factor alone."""
    delay_price: PositiveFloat | Literal["auto"] = "auto"
    """wlb: how much time it may cost to train a waiting document now. To let a document of 1,000 tokens leave one step
    earlier, a step may become longer by the time that 1,000 x delay_price short tokens take. Lower values balance
    better and make documents wait longer. auto: found on the documents at the first step, so that they wait
    target_delay steps on average."""
    target_delay: PositiveFloat = 0.45
    """Mean delay in steps that auto aims at."""
    max_delay_steps: Count = 15
    """A document has left after so many steps, whatever the lengths and whatever it does to the balance."""
    outlier_thresholds: SeveralOrAuto[Annotated[tuple[Count, ...], Field(min_length=1)]] = "auto"
    """wlb_paper: lengths L_1 < L_2 < ... in tokens; documents of L_i to L_(i+1) wait in queue i until it holds N of
    them. auto: the best balance on the documents within target_delay, found at the first step."""
    window: Annotated[int, Field(ge=1, le=1024)] = 1
    """fixed, fixed_solver: global batches that are repacked together."""
    max_step_tokens_factor: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """wlb: a step trains at most so many times its mean tokens, but for documents at max_delay_steps; 0: no limit. The
    optimizer then sees steps of more even size."""
    settings_from: str = ""
    """packing_settings.json of another run: pack as it did, so that two layouts train the same documents in the same
    steps. Empty: resolved for this layout."""
    solver_nodes: Count = 10
    """fixed_solver: nodes that the integer program may search a step (a time limit would not be the same on all
    ranks)."""


class ContextParallel(Section):
    sharding: Literal["per_sequence", "per_document", "hybrid", "adaptive"] = "adaptive"
    """How a micro-batch is cut over context-parallel ranks. per_sequence: the packed sequence into 2 CP pieces.
    per_document: every document into 2 CP chunks. hybrid: long documents over as many ranks as they need, the others
    whole. adaptive: whichever of the three is predicted fastest, for every micro-batch."""
    recompute_kv: bool = False
    """Exchange keys and values again in backward instead of keeping those received: less memory, more traffic."""


class CostModel(Section):
    device: Literal["auto", "cpu", "h100", "h200", "b200"] = "auto"
    """Device whose rates the analytic workload model uses. Frozen at the first step of a run."""
    profile: str = ""
    """JSON of scripts/profile_costs.py: measured costs instead of analytic ones. Frozen at the first step of a run."""


class Parallelism(Section):
    data_parallel_replicate_degree: Count = 1
    """Copies of the sharded model (HSDP)."""
    data_parallel_shard_degree: CountOrAuto = -1
    """FSDP2 ranks with documents of their own; -1: all ranks that are left."""
    tensor_parallel_degree: Count = 1
    """Ranks that share every matrix product (DTensor, with sequence parallelism)."""
    context_parallel_degree: Count = 1
    """Ranks that share every micro-batch."""
    pipeline_parallel_degree: Count = 1
    """Ranks that share the layers."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Schedule of torch.distributed.pipelining. InterleavedZeroBubble, ZBVZeroBubble and DualPipeV split backward, but
    not with activation checkpointing."""
    pipeline_parallel_stages_per_rank: Count = 2
    """Stages a rank of Interleaved1F1B, LoopedBFS and InterleavedZeroBubble (ZBVZeroBubble and DualPipeV have two)."""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after forward, and between micro-batches. Without pipelining ranks that share them then
    wait for each other in every micro-batch, so wlb makes all micro-batches equal. default: where a rank has one
    micro-batch a step and there is no pipelining."""
    reduce_every_micro_batch: bool = False
    """Reduce gradients after every micro-batch, not once a step: no rank holds whole ones (4 bytes a parameter of its
    stages) in between, but data-parallel ranks wait in every micro-batch. Replicas add theirs at the end in both."""
    enable_async_tensor_parallel: bool = False
    """Overlap gathers and scatters of tensor parallelism with matrix products; needs CUDA and compile.enable."""
