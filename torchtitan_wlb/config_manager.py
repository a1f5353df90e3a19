"""From command line and TOML to a checked JobConfig.

1. `--job.config_file F.toml` is read, `--section.key value` flags are laid over it (flag > TOML > default).
2. Unknown sections and keys, wrong types and illegal choices are collected with the nearest valid name.
3. `validate` collects what is impossible together (degrees, heads, lengths, schedules).
All problems come out in one ConfigError before any process group exists; rank 0 prints it, every rank exits with 2.
"""

import dataclasses
import difflib
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from torchtitan_wlb.config import ConfigError, JobConfig
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims, schedule_problem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_SECTIONS: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(JobConfig)}
_KEYS = {s: {f.name: f.type for f in dataclasses.fields(cls)} for s, cls in _SECTIONS.items()}


def _takes_several(section: str, key: str) -> bool:
    """Whether a field is a tuple, alone or in a union with a word such as "auto"."""
    declared = _KEYS.get(section, {}).get(key)
    return any(get_origin(t) is tuple for t in (declared, *get_args(declared)))


def _several(values: list) -> Any:
    return values[0] if values == ["auto"] else values


def load_config(argv: list[str]) -> JobConfig:
    """Build the JobConfig of a run from command-line words.

    Args:
        argv: words as in sys.argv[1:]; `--section.key value`, `--section.key=value`, several values for tuple fields,
            a bare `--section.flag` for true.

    Raises:
        ConfigError: file missing or not TOML, unknown section or key, wrong type, value not among the choices.
    """
    if any(word in ("-h", "--help") for word in argv):
        import tyro

        tyro.cli(
            tyro.conf.FlagConversionOff[JobConfig],
            args=["--help"],
            use_underscores=True,
            description="Flags win over the TOML file.",
        )
    problems: list[str] = []
    flags = _parse_flags(argv, problems)
    merged: dict[str, dict[str, Any]] = {}
    path = flags.get("job", {}).get("config_file", "")
    if path:
        merged = _read_toml(path, problems)
    for section, keys in flags.items():
        merged.setdefault(section, {}).update(keys)
    try:
        config = TypeAdapter(JobConfig).validate_python(merged)
    except ValidationError as error:
        for e in error.errors():
            name = ".".join(str(x) for x in e["loc"])
            problems.append(f"{name} = {e['input']!r}: {e['msg'][0].lower()}{e['msg'][1:]}")
    if problems:
        raise ConfigError(*problems)
    return config


def _parse_flags(argv: list[str], problems: list[str]) -> dict[str, dict[str, Any]]:
    flags: dict[str, dict[str, Any]] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            problems.append(f"{word!r} is not a flag: flags are written --section.key value")
            continue
        name, has_value, value = word[2:].partition("=")
        values = [value] if has_value else []
        section, _, key = name.partition(".")
        key = key.replace("-", "_")
        is_tuple = _takes_several(section, key)
        if not has_value:
            while words and not words[0].startswith("--") and (is_tuple or not values):
                values.append(words.pop(0))
        if not _known(section, key, "--" + name, problems):
            continue
        if not values and _KEYS[section][key] is bool:
            values = ["true"]
        if not values and not is_tuple:
            problems.append(f"--{name} needs a value")
            continue
        flags.setdefault(section, {})[key] = _several(values) if is_tuple else values[0]
    return flags


def _read_toml(path: str, problems: list[str]) -> dict[str, dict[str, Any]]:
    try:
        table = tomllib.loads(Path(path).read_text())
    except OSError as error:
        problems.append(f"--job.config_file {path}: {error.strerror}")
        return {}
    except tomllib.TOMLDecodeError as error:
        problems.append(f"--job.config_file {path} is not TOML: {error}")
        return {}
    merged: dict[str, dict[str, Any]] = {}
    for section, keys in table.items():
        if not isinstance(keys, dict):
            problems.append(f"{section} = {keys!r} in {path} stands outside a section")
            continue
        for key, value in keys.items():
            if _known(section, key, f"[{section}] {key} in {path}", problems):
                if _takes_several(section, key):
                    value = _several(value if isinstance(value, list) else [value])
                merged.setdefault(section, {})[key] = value
        if not keys:
            _known(section, "", f"[{section}] in {path}", problems)
    return merged


def _known(section: str, key: str, shown: str, problems: list[str]) -> bool:
    if section not in _KEYS:
        problems.append(f"{shown}: no section {section!r}{_nearest(section, _KEYS)}")
    elif key and key not in _KEYS[section]:
        problems.append(f"{shown}: [{section}] has no key {key!r}{_nearest(key, _KEYS[section])}")
    else:
        return True
    return False


def _nearest(name: str, valid) -> str:
    match = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
    return f"; nearest: {match[0]}" if match else f"; valid: {', '.join(valid)}"


def validate(config: JobConfig, world_size: int) -> ParallelDims:
    """Check a configuration against the number of processes, and resolve its degrees.

    Returns:
        The parallel degrees, their product equal to world_size.

    Raises:
        ConfigError: with every problem found; each names the flag, the value and what is legal.
    """
    from torchtitan_wlb.models.llama import llama_configs

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
    product = dims.dp * dims.cp * dims.tp * dims.pp
    degrees["data_parallel_shard"] = dims.dp_shard
    check(
        product == world_size,
        "degrees do not multiply to the number of processes: "
        + " x ".join(f"--parallelism.{name}_degree {degree}" for name, degree in degrees.items())
        + f" = {product}, WORLD_SIZE = {world_size}",
    )

    stages_per_rank = p.pipeline_parallel_stages_per_rank
    n_stages = dims.pp * (stages_per_rank if p.pipeline_parallel_schedule == "Interleaved1F1B" else 1)
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

    check(
        not config.compile.enable or dims.tp == 1,
        f"--compile.enable with --parallelism.tensor_parallel_degree {dims.tp}: works with degree 1 only so far",
    )

    n = t.global_batch_size
    check(n >= 1 or n == -1, f"--training.global_batch_size {n}: must be -1 or at least 1")
    if n >= 1:
        problems.extend(batch_problems(n, dims, p.pipeline_parallel_schedule, n_stages))

    unit = dims.cp * math.lcm(2, dims.tp)
    check(t.seq_len_multiple >= 1, f"--training.seq_len_multiple {t.seq_len_multiple}: must be at least 1")
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
    check(k.max_len_factor >= 1.0, f"--packing.max_len_factor {k.max_len_factor}: must be at least 1.0")
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
    check(k.solver_seconds > 0, f"--packing.solver_seconds {k.solver_seconds}: must be above 0")
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
    for name, value in (
        ("metrics.log_freq", config.metrics.log_freq),
        ("checkpoint.interval", config.checkpoint.interval),
        ("profiling.profile_freq", config.profiling.profile_freq),
        ("validation.freq", config.validation.freq),
        ("activation_checkpoint.selective_every", config.activation_checkpoint.selective_every),
        ("training.gc_freq", t.gc_freq),
    ):
        check(value >= 1, f"--{name} {value}: must be at least 1")
    r = config.lr_scheduler
    check(0 < r.decay_ratio <= 1, f"--lr_scheduler.decay_ratio {r.decay_ratio}: must lie in (0, 1]")
    check(r.warmup_steps >= 0, f"--lr_scheduler.warmup_steps {r.warmup_steps}: must be 0 or more")
    if problems:
        raise ConfigError(*problems)
    return dims


def batch_problems(n: int, dims: ParallelDims, schedule: str, n_stages: int) -> list[str]:
    """What speaks against N micro-batches a step in this layout, in config words."""
    if n % dims.dp:
        return [f"--training.global_batch_size {n}: must be a multiple of the {dims.dp} data-parallel ranks"]
    reason = schedule_problem(schedule, dims.pp, n_stages, n // dims.dp)
    return (
        [f"--training.global_batch_size {n} gives {n // dims.dp} micro-batches a data-parallel rank: {reason}"]
        if reason
        else []
    )


def source_problems(section: str, names, paths, weights) -> list[str]:
    """What is wrong with a list of data sources, in config words."""
    from torchtitan_wlb.data.sources import SOURCES

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


def exit_on_config_error(error: ConfigError) -> None:
    """Print the message once (rank 0) and leave with status 2 on every rank.

    The launcher stops all ranks when the first one fails, so the others give rank 0 time to print.
    """
    if int(os.environ.get("RANK", 0)) == 0:
        print(error, file=sys.stderr, flush=True)
    else:
        time.sleep(30)
    sys.exit(2)
