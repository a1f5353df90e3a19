"""From command line and TOML to a checked JobConfig.

1. `--job.config_file F.toml` is read, `--section.key value` flags are laid over it (flag > TOML > default).
2. Unknown sections and keys, wrong types and illegal choices are collected with the nearest valid name.
3. `config_checks.validate` collects what is impossible together (degrees, heads, lengths, schedules).
All problems come out in one ConfigError before any process group exists; rank 0 prints it, every rank exits with 2.
"""

import contextlib
import dataclasses
import difflib
import os
import sys
import time
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from torchtitan_wlb.config import ConfigError, JobConfig

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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"--job.config_file {path} is not TOML: {error}")
        return {}
    merged: dict[str, dict[str, Any]] = {}
    for section, keys in table.items():
        if not isinstance(keys, dict):
            problems.append(f"{section} = {keys!r} in {path} stands outside a section")
            continue
        for key, value in keys.items():
            if _known(section, key, f"[{section}] {key} in {path}", problems):
                if not _toml_type_fits(_KEYS[section][key], value):
                    declared = getattr(_KEYS[section][key], "__name__", _KEYS[section][key])
                    problems.append(f"{section}.{key} = {value!r} in {path}: input should be a valid {declared}")
                    continue
                if _takes_several(section, key):
                    value = _several(value if isinstance(value, list) else [value])
                merged.setdefault(section, {})[key] = value
        if not keys:
            _known(section, "", f"[{section}] in {path}", problems)
    return merged


def _toml_type_fits(declared: Any, value: Any) -> bool:
    """TOML has types, so a number in quotes or a word for a flag is a mistake there (on the command line all are
    words)."""
    if declared is bool:
        return isinstance(value, bool)
    if declared in (int, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return True


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
