"""What a configuration cannot be, and what in it has no effect; before any process group exists."""

import importlib.util
import math

from torchtitan_wlb.config import ConfigError, JobConfig
from torchtitan_wlb.data.sources import SOURCES
from torchtitan_wlb.models.llama import llama_configs
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims, count_stages, schedule_problem


def validate(config: JobConfig, world_size: int) -> ParallelDims:
    """Check a configuration against the number of processes, and resolve its degrees.

    Returns:
        The parallel degrees, their product equal to world_size.



        Raises:
        ConfigError: with every problem found; each names the flag, the value and what is legal.
    """
    problems: list[str] = []
    p, t, k = config.parallelism, config.training, config.packing

    def check(ok: bool, problem: str) -> None:
        if not ok:
            problems.append(problem)

    degrees = {
        "data_parallel_replicate": p.data_parallel_replicate_degree,
        "tensor_parallel": p.tensor_parallel_degree,
        "context_parallel": p.context_parallel_degree,
        "pipeline_parallel": p.pipeline_parallel_degree,
    }
    for name, degree in degrees.items():
        check(degree >= 1, f"--parallelism.{name}_degree {degree}: must be at least 1")
    shard = p.data_parallel_shard_degree
    check(
        shard >= 1 or shard == -1,
        f"--parallelism.data_parallel_shard_degree {shard}: must be -1 or at least 1",
    )
    if problems:
        raise ConfigError(*problems)
    dims = ParallelDims.resolve(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=shard,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        world_size=world_size,
    )
    degrees["data_parallel_shard"] = dims.dp_shard
    check(
        dims.world_size == world_size,
        "degrees do not multiply to the number of processes: "
        + " x ".join(f"--parallelism.{name}_degree {degree}" for name, degree in degrees.items())
        + f" = {dims.world_size}, WORLD_SIZE = {world_size}",
    )

    stages_per_rank = p.pipeline_parallel_stages_per_rank
    n_stages = count_stages(p.pipeline_parallel_schedule, dims.pp, stages_per_rank)
    check(
        stages_per_rank >= 1,
        f"--parallelism.pipeline_parallel_stages_per_rank {stages_per_rank}: must be at least 1",
    )
    if config.model.flavor not in llama_configs:
        problems.append(f"--model.flavor {config.model.flavor}: legal are {', '.join(llama_configs)}")
    else:
        m = llama_configs[config.model.flavor]
        tp = dims.tp
        heads = [
            d
            for d in range(1, m.n_heads + 1)
            if m.n_heads % d == 0 and (m.n_kv_heads % d == 0 or d % m.n_kv_heads == 0)
        ]
        legal = [d for d in heads if m.ffn_dim % d == 0 and 128 % d == 0]
        check(
            tp in legal,
            f"--parallelism.tensor_parallel_degree {tp}: {m.n_heads} heads, {m.n_kv_heads} key/value heads, "
            f"feed-forward {m.ffn_dim} and a vocabulary in multiples of 128 allow {', '.join(map(str, legal))}",
        )
        check(
            n_stages <= m.n_layers,
            f"--parallelism.pipeline_parallel_degree {dims.pp} makes {n_stages} stages, {config.model.flavor} has "
            f"{m.n_layers} layers: every stage needs at least one",
        )

    n = t.global_batch_size
    check(n >= 1 or n == -1, f"--training.global_batch_size {n}: must be -1 or at least 1")
    if n >= 1:
        problems.extend(batch_problems(n, dims, p.pipeline_parallel_schedule))

    unit = dims.cp * math.lcm(2, dims.tp)
    check(
        t.seq_len_multiple >= 1 or t.seq_len_multiple == -1,
        f"--training.seq_len_multiple {t.seq_len_multiple}: must be -1 or at least 1",
    )
    check(t.seq_len >= 2, f"--training.seq_len {t.seq_len}: must be at least 2")
    check(
        t.seq_len % unit == 0,
        f"--training.seq_len {t.seq_len}: must be a multiple of CP x lcm(2, TP) = {unit} "
        f"(--parallelism.context_parallel_degree {dims.cp}, --parallelism.tensor_parallel_degree {dims.tp})",
    )
    if t.seq_len_multiple >= 1:
        check(
            t.seq_len % t.seq_len_multiple == 0,
            f"--training.seq_len_multiple {t.seq_len_multiple}: must divide --training.seq_len {t.seq_len}",
        )
    check(
        1.0 <= k.max_len_factor <= 100,
        f"--packing.max_len_factor {k.max_len_factor}: must lie in 1.0..100",
    )
    if k.outlier_thresholds != "auto":
        th = k.outlier_thresholds
        check(
            list(th) == sorted(set(th)) and all(0 < x <= t.seq_len for x in th),
            f"--packing.outlier_thresholds {' '.join(map(str, th))}: must rise and lie in "
            f"1..{t.seq_len} (--training.seq_len)",
        )
    check(
        k.delay_price == "auto" or k.delay_price > 0, f"--packing.delay_price {k.delay_price}: must be auto or above 0"
    )
    check(k.target_delay > 0, f"--packing.target_delay {k.target_delay}: must be above 0")
    check(k.max_delay_steps >= 0, f"--packing.max_delay_steps {k.max_delay_steps}: must be 0 or more")
    check(k.window >= 1, f"--packing.window {k.window}: must be at least 1")
    check(k.solver_nodes >= 1, f"--packing.solver_nodes {k.solver_nodes}: must be at least 1")
    check(
        k.max_tokens_in_flight == 0 or k.max_tokens_in_flight >= dims.pp * t.seq_len,
        f"--packing.max_tokens_in_flight {k.max_tokens_in_flight}: must be 0 or at least pipeline degree x seq_len = "
        f"{dims.pp * t.seq_len}, the average",
    )
    check(t.steps >= 1, f"--training.steps {t.steps}: must be at least 1")
    check(t.epochs >= 0, f"--training.epochs {t.epochs}: must be 0 (endless) or more")
    check(t.num_workers >= 0, f"--training.num_workers {t.num_workers}: must be 0 or more")
    check(t.loss_chunk_size >= 1, f"--training.loss_chunk_size {t.loss_chunk_size}: must be at least 1")
    problems.extend(source_problems("training", t.dataset, t.dataset_path, t.dataset_weight))
    check(
        not t.loss_mask_column or set(t.dataset) <= {"tokens"},
        f"--training.loss_mask_column {t.loss_mask_column}: works with tokens sources only, not {' '.join(t.dataset)}",
    )
    if config.validation.enable:
        problems.extend(source_problems("validation", config.validation.dataset, config.validation.dataset_path, ()))
    if "bin" in [path.rsplit(".", 1)[-1] for path in t.dataset_path] and t.loss_mask_column:
        problems.append(f"--training.loss_mask_column {t.loss_mask_column}: a flat .bin file has no columns")
    if k.strategy == "fixed_solver" and importlib.util.find_spec("scipy") is None:
        problems.append("--packing.strategy fixed_solver needs SciPy: pip install torchtitan_wlb[solver]")
    o, v = config.optimizer, config.validation
    for name, number, low in (
        ("metrics.log_freq", config.metrics.log_freq, 1),
        ("checkpoint.interval", config.checkpoint.interval, 1),
        ("checkpoint.keep_latest_k", config.checkpoint.keep_latest_k, 0),
        ("profiling.profile_freq", config.profiling.profile_freq, 1),
        ("validation.freq", v.freq, 1),
        ("validation.steps", v.steps, 1),
        ("activation_checkpoint.selective_every", config.activation_checkpoint.selective_every, 1),
        ("training.gc_freq", t.gc_freq, 1),
        ("training.max_norm", t.max_norm, 0),
        ("debug.seed", config.debug.seed, 0),
        ("comm.init_timeout_seconds", config.comm.init_timeout_seconds, 1),
        ("comm.train_timeout_seconds", config.comm.train_timeout_seconds, 1),
        ("optimizer.lr", o.lr, 0),
        ("optimizer.eps", o.eps, 0),
        ("optimizer.weight_decay", o.weight_decay, 0),
    ):
        check(math.isfinite(number) and number >= low, f"--{name} {number}: must be at least {low}")
    for name, share in (("beta1", o.beta1), ("beta2", o.beta2), ("momentum", o.momentum)):
        check(0 <= share < 1, f"--optimizer.{name} {share}: must lie in [0, 1)")
    r = config.lr_scheduler
    check(0 < r.decay_ratio <= 1, f"--lr_scheduler.decay_ratio {r.decay_ratio}: must lie in (0, 1]")
    check(r.warmup_steps >= 0, f"--lr_scheduler.warmup_steps {r.warmup_steps}: must be 0 or more")
    if problems:
        raise ConfigError(*problems)
    return dims


def batch_problems(n: int, dims: ParallelDims, schedule: str) -> list[str]:
    """What speaks against N micro-batches a step in this layout, in config words."""
    if n % dims.dp:
        return [f"--training.global_batch_size {n}: must be a multiple of the {dims.dp} data-parallel ranks"]
    reason = schedule_problem(schedule, dims.pp, n // dims.dp)
    return (
        [f"--training.global_batch_size {n} gives {n // dims.dp} micro-batches a data-parallel rank: {reason}"]
        if reason
        else []
    )


def source_problems(section: str, names, paths, weights) -> list[str]:
    """What is wrong with a list of data sources, in config words."""
    problems = []
    for name in names:
        if name not in SOURCES:
            problems.append(f"--{section}.dataset {name}: legal are {', '.join(SOURCES)}")
    if not names:
        problems.append(f"--{section}.dataset: at least one of {', '.join(SOURCES)}")
    if paths and len(paths) != len(names):
        problems.append(
            f"--{section}.dataset_path has {len(paths)} entries, --{section}.dataset has {len(names)}: one each"
        )
    for name, path in zip(names, paths or [""] * len(names)):
        if name in SOURCES and SOURCES[name].needs_path and not path:
            problems.append(f"--{section}.dataset {name} needs --{section}.dataset_path")
    if weights and (len(weights) != len(names) or min(weights) <= 0):
        problems.append(f"--{section}.dataset_weight {weights}: one positive number for each of {' '.join(names)}")
    return problems


def settings_without_effect(config: JobConfig) -> list[str]:
    """Settings that differ from their default but change nothing in this configuration, in config words."""
    default = JobConfig()
    k, p, t = config.packing, config.parallelism, config.training
    unused = [
        ("packing", "delay_price", k.strategy != "wlb", "only wlb uses it"),
        ("packing", "max_delay_steps", k.strategy != "wlb", "only wlb uses it"),
        ("packing", "max_tokens_in_flight", k.strategy != "wlb", "only wlb uses it"),
        ("packing", "outlier_thresholds", k.strategy != "wlb_paper", "only wlb_paper uses it"),
        ("packing", "max_len_factor", not k.strategy.startswith("wlb"), "only wlb and wlb_paper use it"),
        ("packing", "window", not k.strategy.startswith("fixed"), "only fixed and fixed_solver use it"),
        ("packing", "solver_nodes", k.strategy != "fixed_solver", "only fixed_solver uses it"),
        ("context_parallel", "sharding", p.context_parallel_degree == 1, "context_parallel_degree is 1"),
        ("parallelism", "pipeline_parallel_schedule", p.pipeline_parallel_degree == 1, "pipeline_parallel_degree is 1"),
        ("checkpoint", "load_step", not config.checkpoint.enable, "checkpoint.enable is false"),
        ("checkpoint", "interval", not config.checkpoint.enable, "checkpoint.enable is false"),
        ("validation", "dataset", not config.validation.enable, "validation.enable is false"),
        ("training", "dataset_weight", len(t.dataset) == 1, "there is one source"),
    ]
    return [
        f"--{section}.{key} {getattr(getattr(config, section), key)} has no effect: {reason}"
        for section, key, is_unused, reason in unused
        if is_unused and getattr(getattr(config, section), key) != getattr(getattr(default, section), key)
    ]
