"""From command line and TOML to a JobConfig.

1. `--job.config_file F.toml` is read, `--section.key value` flags are laid over it (flag > TOML > default).
2. The sections of config/ check names, types and ranges; every problem is collected with what is legal.
3. config_checks.validate then collects what is impossible together (degrees, heads, lengths, schedules).
Problems come out in one ConfigError before any file of data is opened; rank 0 prints it, every rank exits with 2.
"""

import contextlib
import difflib
import os
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from torchtitan_wlb.config import JobConfig
from torchtitan_wlb.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LAX = partial(TypeAdapter, config=ConfigDict(allow_inf_nan=False))  # on the command line all values are words
SECTIONS: dict[str, Any] = {name: info.annotation for name, info in JobConfig.model_fields.items()}

# Keys of torchtitan's TOML files up to 2025 that are called something else here.
MOVED = {
    "checkpoint.create_seed_checkpoint": "nothing: initial weights are the same in every layout",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.interval_type": "checkpoint.interval, which counts steps",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.context_parallel_rotate_method": "context_parallel.sharding",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_microbatches": "training.global_batch_size, micro-batches of all ranks",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_split_points": "parallelism.pipeline_parallel_stages_per_rank",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor, a share of the peak",
    "metrics.disable_color_printing": "metrics.enable_color",
    "metrics.enable_color_printing": "metrics.enable_color",
    "model.name": "model.flavor",
    "model.norm_type": "nothing: the norm is RMSNorm",
    "model.tokenizer_path": "model.tokenizer",
    "optimizer.implementation": "optimizer.fused",
    "training.batch_size": "training.global_batch_size, micro-batches of all ranks",
    "training.local_batch_size": "training.global_batch_size, micro-batches of all ranks",
    "training.compile": "compile.enable",
    "training.context_parallel_degree": "parallelism.context_parallel_degree",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.deterministic": "debug.deterministic",
    "training.disable_loss_parallel": "nothing: the loss is always split over tensor-parallel ranks",
    "training.fsdp_reshard_after_forward": "parallelism.reshard_after_forward",
    "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "training.seed": "debug.seed",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
}


def load_config(argv: list[str]) -> JobConfig:
    """Build the JobConfig of a run from command-line words.

    Args:
        argv: words as in sys.argv[1:]; `--section.key value`, `--section.key=value`, several values for tuple fields,
            a bare `--section.flag` for true. Of a flag given twice the later value counts, and both are checked.

    Raises:
        ConfigError: file missing or not TOML, unknown section or key, wrong type, value out of range.
        SystemExit: after printing the help text for -h, --help or `--help SECTION`.
    """
    if help_at := [i for i, word in enumerate(argv) if word in ("-h", "--help")]:
        print(help_text(argv[help_at[0] + 1 :]))
        sys.exit(0)
    problems: list[str] = []
    flags = _parse_flags(argv, problems)
    path = flags.get("job", {}).get("config_file", "")
    merged = _read_toml(path, problems) if "config_file" in flags.get("job", {}) else {}
    for section, keys in flags.items():
        merged.setdefault(section, {}).update(keys)
    try:
        config = JobConfig.model_validate(merged)
    except ValidationError as error:
        for where, found in _first_of_each_key(error).items():
            problems.append(f"{where} = {found['input']!r}{f' in {path}' if path else ''}: {_reason(found)}")
    if problems:
        raise ConfigError(*problems)
    return config


def _parse_flags(argv: list[str], problems: list[str]) -> dict[str, dict[str, Any]]:
    """{section: {key: value}} of the flags that are right; what is wrong with the others goes to problems."""
    flags: dict[str, dict[str, Any]] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            problems.append(f"{word!r} is not a flag: flags are written --section.key value")
            continue
        name, has_value, value = word[2:].partition("=")
        section, _, key = name.partition(".")
        key = key.replace("-", "_")
        declared = _declared(section, key)
        takes_several = declared is not None and _takes_several(declared)
        values = [value] if has_value else []
        if not has_value:
            while words and not words[0].startswith("--") and (takes_several or not values):
                values.append(words.pop(0))
        if declared is None:
            problems.append(f"--{name}: {_unknown(section, key)}")
            continue
        if not values and declared is bool:
            values = ["true"]
        if not values and not takes_several:
            problems.append(f"--{name} needs a value")
            continue
        try:
            given = values if takes_several else values[0]
            flags.setdefault(section, {})[key] = _LAX(declared).validate_python(given, strict=False)
        except ValidationError as error:
            problems.append(f"--{name} {' '.join(values)}: {_reason(error.errors()[0])}")
    return flags


def _read_toml(path: str, problems: list[str]) -> dict[str, dict[str, Any]]:
    """The known sections and keys of a file, as they stand there."""
    try:
        table = tomllib.loads(Path(path or "(no name)").read_text())
    except OSError as error:
        problems.append(f"--job.config_file {path}: {error.strerror}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"--job.config_file {path} is not TOML: {error}")
        return {}
    merged: dict[str, dict[str, Any]] = {}
    for section, keys in table.items():
        if not isinstance(keys, dict):
            problems.append(f"{section} = {keys!r} in {path} stands outside a section")
            continue
        for key, value in keys.items():
            if _declared(section, key) is None:
                problems.append(f"[{section}] {key} in {path}: {_unknown(section, key)}")
            else:
                merged.setdefault(section, {})[key] = value
        if not keys and section not in SECTIONS:
            problems.append(f"[{section}] in {path}: {_unknown(section, '')}")
    return merged


def _declared(section: str, key: str) -> Any:
    """Type of a field with its ranges, None if there is no such field."""
    info = SECTIONS[section].model_fields.get(key) if section in SECTIONS else None
    if info is None:
        return None
    return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation


def _takes_several(declared: Any) -> bool:
    """Whether a type is a tuple, alone or in a union with a word such as "auto"."""
    return get_origin(declared) is tuple or any(
        _takes_several(x) for x in get_args(declared) if get_origin(declared) is not tuple
    )


def _unknown(section: str, key: str) -> str:
    if f"{section}.{key}" in MOVED:
        return f"here it is {MOVED[f'{section}.{key}']}"
    if section not in SECTIONS:
        return f"no section {section!r}{_nearest(section, SECTIONS)}"
    if not key:
        return f"a section, not a key; its keys: {', '.join(SECTIONS[section].model_fields)}"
    return f"[{section}] has no key {key!r}{_nearest(key, SECTIONS[section].model_fields)}"


def _nearest(name: str, valid) -> str:
    match = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
    return f"; nearest: {match[0]}" if match else f"; valid: {', '.join(valid)}"


def _first_of_each_key(error: ValidationError) -> dict[str, Any]:
    """{section.key: error}; a union reports one for each of its types."""
    found: dict[str, Any] = {}
    for e in error.errors():
        found.setdefault(".".join(map(str, e["loc"][:2])), e)
    return found


def _reason(error: Any) -> str:
    """What pydantic says, without the words that only a programmer needs."""
    message = error["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def help_text(sections: list[str]) -> str:
    """Keys, types, defaults and help of some sections; of all, one line a key."""
    lines = [
        "train.py --job.config_file F.toml [--section.key value ...]",
        "Flags win over the file, the file over defaults.",
    ]
    known = [s for s in sections if s in SECTIONS]
    for name in known or SECTIONS:
        lines += ["", f"[{name}]"]
        for key, info in SECTIONS[name].model_fields.items():
            default = info.default if info.default != () else "none"
            about = " ".join((info.description or "").split())
            if known:
                lines.append(f"  {key} = {default}")
                lines += textwrap.wrap(about, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
            else:
                lines.append("  " + textwrap.shorten(f"{key} = {default}: {about}", 118, placeholder=" ..."))
    if not known:
        lines += ["", "The whole text of a section: train.py --help SECTION"]
    return "\n".join(lines)


@contextlib.contextmanager
def exit_on_config_error():
    """Around a whole program: a ConfigError is printed once, by rank 0, and every rank leaves with status 2.

    The launcher stops all ranks when the first one fails, so the others give rank 0 time to print; one that is still
    there after that has an error of its own machine to tell.
    """
    try:
        yield
    except ConfigError as error:
        if int(os.environ.get("RANK", 0)) != 0:
            time.sleep(30)
        print(error, file=sys.stderr, flush=True)
        sys.exit(2)
