"""Where documents come from: name -> raw rows, before tokenising.

A text source makes texts of whole files; a table source has rows with columns, of text, of conversations or (`tokens`)
of ids as they are, to which no begin or end ids are added; `synthetic` gives lengths only.
"""

import ast
import glob
import os
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import logger


@dataclass(frozen=True)
class Source:
    """A named kind of source.

    Attributes:
        kind: "text" (whole files, or what `read` makes of one), "table" (rows with columns), "flat" (ids mapped as they
            are) or "lengths" (synthetic).
        suffixes: of the files of a folder that are read, "" for all; None for sources that are not files.
        read: texts of one file.
    """

    kind: str
    needs_path: bool
    suffixes: tuple[str, ...] | None = None
    read: Callable[[str], Iterator[str]] | None = None

    def files(self, path: str, held_out: bool = False) -> list[str]:
        """The files of a path, sorted; [] for sources that are not files.

        Args:
            held_out: the documents are for evaluation: files that look held out are read, too.
        """
        if not self.needs_path:
            return _stdlib_files()
        if self.suffixes is None:
            return []
        files = find_files(path, self.suffixes)
        if held_out or self.kind == "text":  # a name of a text is no split: tests/test_x.py is code
            return files
        kept = [f for f in files if not looks_held_out(f, path)]
        if len(kept) < len(files):
            out = len(files) - len(kept)
            logger.info(f"{out} files of {path} look held out and are left out; name them to read them")
        return kept


_HELD_OUT = re.compile(r"(^|[^a-z])(tests?|valid|validation|val|dev|eval|held[_-]?out)([^a-z]|$)")


def looks_held_out(file: str, path: str) -> bool:
    """Whether the name of a file, or of a folder between it and its source, says so, and the path of the source (its
    last name, or its pattern) does not: then it has been asked for."""
    names, first = Path(path).parts, _first_pattern(path)
    if _HELD_OUT.search("/".join(names[first:]).lower()):
        return False
    root = Path(*names) if Path(path).is_dir() else Path(*names[:first])
    return any(_HELD_OUT.search(part) for part in Path(os.path.relpath(file, root).lower()).parts)


def _first_pattern(path: str) -> int:
    """Which name of a path is the first with a wildcard, or the last one."""
    names = Path(path).parts
    return next((i for i, name in enumerate(names) if set(name) & set("*?[")), len(names) - 1)


def _stdlib_files() -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "__pycache__"}
    return [str(p) for p in sorted(root.rglob("*.py")) if not skip & set(p.relative_to(root).parts)]


def _is_marker(name: str) -> bool:
    """What lies beside data: hidden, _SUCCESS and its like, check sums, locks."""
    return name.startswith((".", "_")) or name.endswith((".crc", ".lock", ".tmp"))


def find_files(path: str, suffixes: tuple[str, ...]) -> list[str]:
    """Files of a folder and its sub-folders with one of some suffixes, without hidden ones; or a glob, or one file.

    Raises:
        ConfigError: a sub-folder cannot be read.
    """

    def unreadable(error: OSError) -> None:
        raise ConfigError(f"--training.dataset_path {path}: {error.filename}: {error.strerror}") from error

    if not Path(path).is_dir():
        found = [p for p in glob.glob(path, recursive=True) if Path(p).is_file()]
        root = Path(*Path(path).parts[: _first_pattern(path)])
        inside = [Path(os.path.relpath(p, root)).parts for p in found]
        asked = _is_marker(Path(path).name)
        return sorted(p for p, names in zip(found, inside) if asked or not any(map(_is_marker, names)))
    found = []
    for folder, folders, files in os.walk(path, onerror=unreadable):
        folders[:] = [name for name in folders if not _is_marker(name)]
        found += [os.path.join(folder, f) for f in files if f.endswith(suffixes) and not _is_marker(f)]
    return sorted(found)


def read_file(path: str) -> Iterator[str]:
    """One document a file; bytes that are not UTF-8 are replaced."""
    yield Path(path).read_text(encoding="utf-8", errors="replace")


def read_functions(path: str) -> Iterator[str]:
    """One document for every function and method of a Python file (a function inside a function belongs to the outer
    one); a file that does not parse has none."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    try:
        todo: list[ast.AST] = [ast.parse(text)]
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.splitlines(keepends=True)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
        else:
            todo.extend(reversed(list(ast.iter_child_nodes(node))))


JSON = tuple(f".{kind}{packed}" for kind in ("json", "jsonl") for packed in ("", ".gz", ".zst"))
_TABLES = (*JSON, ".parquet", ".arrow")
SOURCES = {
    "stdlib": Source("text", False, ("",), read_functions),
    "stdlib_files": Source("text", False, ("",), read_file),
    "text": Source("text", True, ("",), read_file),
    "json": Source("table", True, JSON),
    "parquet": Source("table", True, (".parquet",)),
    "arrow": Source("table", True, (".arrow",)),
    "hf": Source("table", True),
    "tokens": Source("table", True, (*_TABLES, ".bin")),
    "megatron": Source("flat", True, (".bin",)),
    "synthetic": Source("lengths", True),
}


def is_flat(name: str, path: str) -> bool:
    """Whether a source is one file of ids that is mapped as it is."""
    return name == "megatron" or (name == "tokens" and path.endswith(".bin"))


def source_identity(name: str, path: str, files: list[str]) -> str:
    """A string that changes whenever the documents of a source could have changed: names, sizes and times of its files.

    Raises:
        ConfigError: the path matches no file.
    """
    if name.startswith("stdlib"):
        return f"{name} {sys.version}"
    if name == "hf" or (name == "synthetic" and not Path(path).is_file()):
        return f"{name} {path}"
    files = [path] if name == "synthetic" or is_flat(name, path) else files
    beside = {"tokens": ".json", "megatron": ".idx"}
    files = files + [str(Path(p).with_suffix(beside[name])) for p in files if p.endswith(".bin") and name in beside]
    if missing := [p for p in files if not Path(p).is_file()]:
        raise ConfigError(f"--training.dataset_path {path}: {', '.join(missing)} is missing")
    if not files:
        raise ConfigError(f"--training.dataset_path {path}: no file found for --training.dataset {name}")
    stats = [(p, Path(p).stat().st_size, Path(p).stat().st_mtime_ns) for p in files]
    return f"{name} {stats}"
