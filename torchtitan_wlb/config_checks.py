"""What in a configuration does not go together, and what in it has no effect; before any file of data is opened.

A check is a function of (configuration, degrees) that yields problems in config words: the flag, its value, what is
legal. Ranges of single fields stand in config/.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path, PurePath

from torchtitan_wlb.config import JobConfig, Training, Validation
from torchtitan_wlb.cost.cost_model import CostModel
from torchtitan_wlb.data.documents import PER_SOURCE
from torchtitan_wlb.data.encode import fields_of
from torchtitan_wlb.data.micro_batch import padded_length
from torchtitan_wlb.data.sources import SOURCES
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.layout_packing import batch_problems, micro_batches_alive, resolve_batch, resolve_packing
from torchtitan_wlb.models.hf import find_model
from torchtitan_wlb.models.model_args import llama_configs
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims
from torchtitan_wlb.parallelisms.schedules import (
    SPLIT_SCHEDULES,
    count_stages,
)

Problems = Iterator[str]
_ANY_COST = CostModel(pair_flops=1.0, token_cost=1.0, knots=(1,), rates=(1.0,))  # limits do not depend on costs


def validate(config: JobConfig, world_size: int) -> ParallelDims:
    """Check a configuration against the number of processes, and resolve its degrees.

    Returns:
        The parallel degrees; their product is world_size.

    Raises:
        ConfigError: with every problem found.
    """
    p = config.parallelism
    parallel_dims = ParallelDims.resolve(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=p.data_parallel_shard_degree,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        world_size=world_size,
    )
    problems = list(check_degrees(parallel_dims, world_size))
    for check in CHECKS:
        problems += check(config, parallel_dims)
    if problems:
        raise ConfigError(*problems)
    return parallel_dims


def check_degrees(dims: ParallelDims, world_size: int) -> Problems:
    if dims.world_size != world_size:
        degrees = {
            "data_parallel_replicate": dims.dp_replicate,
            "data_parallel_shard": dims.dp_shard,
            "context_parallel": dims.cp,
            "tensor_parallel": dims.tp,
            "pipeline_parallel": dims.pp,
        }
        product = " x ".join(f"--parallelism.{name}_degree {degree}" for name, degree in degrees.items())
        yield (
            f"degrees do not multiply to the number of processes: {product} = {dims.world_size}, "
            f"WORLD_SIZE = {world_size}"
        )


def check_model(config: JobConfig, dims: ParallelDims) -> Problems:
    flavor, p = config.model.flavor, config.parallelism
    if flavor not in llama_configs and not Path(flavor).is_dir():
        yield f"--model.flavor {flavor}: legal are {', '.join(llama_configs)}, or a folder with a config.json"
        return
    try:
        m = find_model(config.model)
    except ConfigError as error:
        yield from error.problems
        return
    legal = [
        d
        for d in range(1, m.n_heads + 1)
        if m.n_heads % d == 0
        and (m.n_kv_heads % d == 0 or d % m.n_kv_heads == 0)
        and m.ffn_dim % d == 0
        and 128 % d == 0
    ]
    if dims.tp not in legal:
        yield (
            f"--parallelism.tensor_parallel_degree {dims.tp}: {m.n_heads} heads, {m.n_kv_heads} key/value heads, "
            f"feed-forward {m.ffn_dim} and a vocabulary in multiples of 128 allow {', '.join(map(str, legal))}"
        )
    n_stages = count_stages(p.pipeline_parallel_schedule, dims.pp, p.pipeline_parallel_stages_per_rank)
    if n_stages > m.n_layers:
        yield (
            f"--parallelism.pipeline_parallel_degree {dims.pp} makes {n_stages} stages, {flavor} has {m.n_layers} "
            "layers: every stage needs at least one"
        )


def check_batch(config: JobConfig, dims: ParallelDims) -> Problems:
    yield from batch_problems(resolve_batch(config, dims), dims, config.parallelism.pipeline_parallel_schedule)


def check_parallelism(config: JobConfig, dims: ParallelDims) -> Problems:
    p = config.parallelism
    splits = p.pipeline_parallel_schedule in SPLIT_SCHEDULES and config.activation_checkpoint.mode == "none"
    if dims.pp > 1 and splits and p.reshard_after_forward == "always":
        yield (
            f"--parallelism.reshard_after_forward always: {p.pipeline_parallel_schedule} splits backward, which then "
            "loses gradients; legal are default and never, or --activation_checkpoint.mode selective or full"
        )
    if dims.pp > 1 and splits and p.reduce_every_micro_batch:
        yield (
            f"--parallelism.reduce_every_micro_batch: {p.pipeline_parallel_schedule} splits backward and has whole "
            "gradients at the end only; legal with --activation_checkpoint.mode selective or full"
        )
    if p.enable_async_tensor_parallel and not (config.compile.enable and dims.tp > 1):
        yield (
            "--parallelism.enable_async_tensor_parallel: needs --compile.enable and "
            "--parallelism.tensor_parallel_degree of at least 2"
        )


def length_unit(dims: ParallelDims) -> int:
    """Lengths of micro-batches are multiples of this, see data/micro_batch.py."""
    return padded_length(1, dims.cp, dims.tp, 1)


def check_lengths(config: JobConfig, dims: ParallelDims) -> Problems:
    t = config.training
    unit = length_unit(dims)
    if t.seq_len % unit:
        yield (
            f"--training.seq_len {t.seq_len}: must be a multiple of CP x lcm(2, TP) = {unit} "
            f"(--parallelism.context_parallel_degree {dims.cp}, --parallelism.tensor_parallel_degree {dims.tp})"
        )
    if config.packing.max_tokens_in_flight and t.length_multiple % unit:
        yield (
            f"--training.seq_len_multiple {t.length_multiple}: must be a multiple of CP x lcm(2, TP) = {unit}, so that "
            "padding counts in --packing.max_tokens_in_flight"
        )
    if t.seq_len % t.length_multiple:
        yield f"--training.seq_len_multiple {t.seq_len_multiple}: must divide --training.seq_len {t.seq_len}"


def check_packing(config: JobConfig, dims: ParallelDims) -> Problems:
    k, window = config.packing, config.training.seq_len
    if (th := k.outlier_thresholds) != "auto" and (list(th) != sorted(set(th)) or max(th) > window):
        shown = " ".join(map(str, th))
        yield f"--packing.outlier_thresholds {shown}: must rise and lie in 1..{window} (--training.seq_len)"
    if k.strategy == "fixed_solver" and importlib.util.find_spec("scipy") is None:
        yield "--packing.strategy fixed_solver needs SciPy: pip install torchtitan_wlb[solver]"
    alive = micro_batches_alive(config, dims, resolve_batch(config, dims)) if k.max_tokens_in_flight else 0
    if too_few := 0 < k.max_tokens_in_flight < alive * window:
        yield (
            f"--packing.max_tokens_in_flight {k.max_tokens_in_flight}: must be 0 or at least {alive} x seq_len = "
            f"{alive * window}: the schedule has {alive} micro-batches alive at once"
        )
    if window % config.training.length_multiple:
        return  # check_lengths says so
    mean = config.training.micro_batch_tokens
    if isinstance(mean, int) and mean not in (-1, window) and (mean > window or not k.strategy.startswith("wlb")):
        legal = f"1 to {window}" if k.strategy.startswith("wlb") else f"-1 or {window} with {k.strategy}"
        yield f"--training.micro_batch_tokens {mean}: legal are {legal} (--training.seq_len)"
        return
    n = resolve_batch(config, dims)
    settings = next(resolve_packing(config, dims, _ANY_COST))
    if 0 < settings.max_step_tokens < max(window, n * settings.micro_batch_tokens):
        yield (
            f"--packing.max_step_tokens_factor {k.max_step_tokens_factor}: must be 0 or at least 1, with room for one "
            f"document of --training.seq_len {window}"
        )
    unit = length_unit(dims)
    if k.strategy.startswith("wlb") and settings.s_max % unit and not window % unit:
        yield (
            f"--packing.max_len_factor {k.max_len_factor}: S_max = {settings.s_max} tokens must be a multiple of CP x "
            f"lcm(2, TP) = {unit}, or padding would go beyond it; {settings.s_max // unit * unit / window} is"
        )
    if too_few:
        return
    deadline = settings.deadline
    least = deadline.least_delay(k.window if k.strategy.startswith("fixed") else 0)
    if k.max_delay_steps < least and not k.strategy.startswith("plain"):
        yield (
            f"--packing.max_delay_steps {k.max_delay_steps}: must be at least {least} with {n} micro-batches of at "
            f"most {deadline.capacity} tokens (--packing.strategy {k.strategy}), or documents could wait longer"
        )


def check_schedule_of_rate(config: JobConfig, dims: ParallelDims) -> Problems:
    r, steps = config.lr_scheduler, config.lr_scheduler.steps or config.training.steps
    if r.warmup_steps > steps:
        yield (
            f"--lr_scheduler.warmup_steps {r.warmup_steps}: the schedule has {steps} steps (--lr_scheduler.steps, "
            "or --training.steps where that is 0)"
        )


def check_folders(config: JobConfig, dims: ParallelDims) -> Problems:
    c, m, p = config.checkpoint, config.metrics, config.profiling
    if c.initial_load_path and not Path(c.initial_load_path).is_dir():
        yield f"--checkpoint.initial_load_path {c.initial_load_path}: no such folder"
    for name, folder in (
        ("checkpoint.folder", c.folder),
        ("metrics.save_tb_folder", m.save_tb_folder),
        ("profiling.save_traces_folder", p.save_traces_folder),
        ("profiling.save_memory_snapshot_folder", p.save_memory_snapshot_folder),
    ):
        path = PurePath(folder)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            yield f"--{name} {folder}: must be the name of a folder under --job.dump_folder"


def check_sources(config: JobConfig, dims: ParallelDims) -> Problems:
    t, v = config.training, config.validation
    yield from source_problems("training", t.dataset, t.dataset_path, t.dataset_weight)
    yield from per_source_problems("training", t)
    if v.enable:
        yield from source_problems("validation", v.dataset, v.dataset_path, ())
        yield from per_source_problems("validation", v)
        if v.dataset_name and len(v.dataset_name) != len(v.dataset):
            yield f"--validation.dataset_name {' '.join(v.dataset_name)}: one for each of {len(v.dataset)} sources"


def per_source_problems(section: str, of: Training | Validation) -> Problems:
    if (column := of.loss_mask_column) and not set(of.dataset) <= {"tokens"}:
        yield f"--{section}.loss_mask_column {column}: works with tokens sources only, not {' '.join(of.dataset)}"
    if column and any(path.endswith(".bin") for path in of.dataset_path):
        yield f"--{section}.loss_mask_column {column}: a flat .bin file has no columns"
    for key in PER_SOURCE:
        values = getattr(of, key)
        if len(values) not in (1, len(of.dataset)):
            yield f"--{section}.{key} {' '.join(values)}: one for all, or one for each of {' '.join(of.dataset)}"
    for column in of.dataset_column:
        try:
            fields_of(column)
        except ConfigError as error:
            yield from (p.replace("--training.", f"--{section}.") for p in error.problems)
    texts = ("json", "parquet", "arrow", "hf")
    for i, name in enumerate(of.dataset):
        if of.dataset_format[i % len(of.dataset_format)] == "messages" and name not in texts and name in SOURCES:
            yield f"--{section}.dataset_format messages: {name} has no conversations; legal are {', '.join(texts)}"


def source_problems(section: str, names, paths, weights) -> Problems:
    """What is wrong with a list of data sources."""
    if not names:
        yield f"--{section}.dataset: at least one of {', '.join(SOURCES)}"
    for name in names:
        if name not in SOURCES:
            yield f"--{section}.dataset {name}: legal are {', '.join(SOURCES)}"
    if paths and len(paths) != len(names):
        yield f"--{section}.dataset_path has {len(paths)} entries, --{section}.dataset has {len(names)}: one each"
    for name, path in zip(names, paths or [""] * len(names)):
        if name in SOURCES and SOURCES[name].needs_path and not path:
            yield f"--{section}.dataset {name} needs --{section}.dataset_path"
    if weights and len(weights) != len(names):
        yield f"--{section}.dataset_weight {weights}: one positive number for each of {' '.join(names)}"


CHECKS = (
    check_model,
    check_batch,
    check_parallelism,
    check_lengths,
    check_packing,
    check_schedule_of_rate,
    check_folders,
    check_sources,
)


def settings_without_effect(config: JobConfig) -> list[str]:
    """Settings that differ from their default but change nothing in this configuration, in config words."""
    default = JobConfig()
    k, p, t = config.packing, config.parallelism, config.training
    unused = [
        ("packing", "delay_price", k.strategy != "wlb", "only wlb uses it"),
        ("packing", "max_delay_steps", k.strategy.startswith("plain"), "nothing waits"),
        ("packing", "max_tokens_in_flight", k.strategy != "wlb", "only wlb uses it"),
        ("packing", "max_step_tokens_factor", k.strategy != "wlb", "only wlb uses it"),
        ("model", "rope_factor", config.model.rope_scaling in ("model", "none"), "rope_scaling says nothing of it"),
        ("training", "micro_batch_tokens", not k.strategy.startswith("wlb"), "only wlb and wlb_paper use it"),
        ("packing", "outlier_thresholds", k.strategy != "wlb_paper", "only wlb_paper uses it"),
        ("packing", "max_len_factor", not k.strategy.startswith("wlb"), "only wlb and wlb_paper use it"),
        ("packing", "window", not k.strategy.startswith("fixed"), "only fixed and fixed_solver use it"),
        ("packing", "solver_nodes", k.strategy != "fixed_solver", "only fixed_solver uses it"),
        ("context_parallel", "sharding", p.context_parallel_degree == 1, "context_parallel_degree is 1"),
        ("parallelism", "pipeline_parallel_schedule", p.pipeline_parallel_degree == 1, "pipeline_parallel_degree is 1"),
        ("checkpoint", "load_step", not config.checkpoint.enable, "checkpoint.enable is false"),
        ("checkpoint", "interval", not config.checkpoint.enable, "checkpoint.enable is false"),
        ("checkpoint", "exclude_from_loading", not config.checkpoint.enable, "checkpoint.enable is false"),
        ("optimizer", "fused", config.optimizer.name != "AdamW", "only AdamW has it"),
        ("validation", "dataset", not config.validation.enable, "validation.enable is false"),
        ("training", "dataset_weight", len(t.dataset) == 1, "there is one source"),
    ]
    return [
        f"--{section}.{key} {getattr(getattr(config, section), key)} has no effect: {reason}"
        for section, key, is_unused, reason in unused
        if is_unused and getattr(getattr(config, section), key) != getattr(getattr(default, section), key)
    ]
