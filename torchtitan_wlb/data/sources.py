"""Where documents come from: name -> raw rows, before tokenising.

A text source is a generator of strings over a list of shards (files), so that several processes can share the work;
`tokens` sources give ids as they are (no begin or end ids are added); `synthetic` gives lengths only. `documents.py`
turns all of them into one memory-mapped form.
"""

import ast
import glob
import os
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_wlb.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """A named kind of source.

    kind: "text" (rows of text), "tokens" (rows of ids, or a flat file) or "lengths" (synthetic).
    suffixes: of the files of a folder that are read, "" for all; None for sources that are not files.
    read: generator of texts over shards; None where the datasets library reads the format.
    """

    kind: str
    needs_path: bool
    suffixes: tuple[str, ...] | None = None
    read: Callable[[list[str]], Iterator[str]] | None = None

    def shards(self, path: str) -> list[str]:
        """The files of a path, sorted; [] for sources that are not files."""
        if not self.needs_path:
            return _stdlib_shards()
        return [] if self.suffixes is None else find_files(path, self.suffixes)


def _stdlib_shards() -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "__pycache__"}
    return [str(p) for p in sorted(root.rglob("*.py")) if not skip & set(p.relative_to(root).parts)]


def find_files(path: str, suffixes: tuple[str, ...]) -> list[str]:
    """Files of a folder and its sub-folders with one of some suffixes, without hidden ones; or a glob, or one file.

    Raises:
        ConfigError: a sub-folder cannot be read.
    """

    def unreadable(error: OSError) -> None:
        raise ConfigError(f"--training.dataset_path {path}: {error.filename}: {error.strerror}") from error

    if not Path(path).is_dir():
        return sorted(p for p in glob.glob(path, recursive=True) if Path(p).is_file())
    found = []
    for folder, folders, files in os.walk(path, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(folder, f) for f in files if f.endswith(suffixes) and not f.startswith(".")]
    return sorted(found)


def read_files(shards: list[str]) -> Iterator[str]:
    """One document a file; bytes that are not UTF-8 are replaced."""
    for path in shards:
        yield Path(path).read_text(encoding="utf-8", errors="replace")


def read_functions(shards: list[str]) -> Iterator[str]:
    """One document for every function and method of Python files (a function inside a function belongs to the outer
    one); files that do not parse are skipped."""
    for path in shards:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        try:
            todo: list[ast.AST] = [ast.parse(text)]
        except (SyntaxError, ValueError, RecursionError):
            continue
        lines = text.splitlines(keepends=True)
        while todo:
            node = todo.pop()
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
            else:
                todo.extend(reversed(list(ast.iter_child_nodes(node))))


JSON = tuple(f".{kind}{packed}" for kind in ("json", "jsonl") for packed in ("", ".gz", ".zst"))
SOURCES = {
    "stdlib": Source("text", False, ("",), read_functions),
    "stdlib_files": Source("text", False, ("",), read_files),
    "text": Source("text", True, ("",), read_files),
    "json": Source("text", True, JSON),
    "parquet": Source("text", True, (".parquet",)),
    "hf": Source("text", True),
    "tokens": Source("tokens", True, (*JSON, ".parquet", ".bin")),
    "synthetic": Source("lengths", True),
}


def source_identity(name: str, path: str) -> str:
    """A string that changes whenever the documents of a source could have changed: names, sizes and times of its files.

    Raises:
        ConfigError: the path matches no file.
    """
    if name.startswith("stdlib"):
        return f"{name} {sys.version}"
    if name == "hf" or (name == "synthetic" and not Path(path).is_file()):
        return f"{name} {path}"
    shards = [path] if name == "synthetic" else SOURCES[name].shards(path)
    shards += [str(Path(p).with_suffix(".json")) for p in shards if p.endswith(".bin") and name == "tokens"]
    if missing := [p for p in shards if not Path(p).is_file()]:
        raise ConfigError(f"--training.dataset_path {path}: {', '.join(missing)} is missing")
    if not shards:
        raise ConfigError(f"--training.dataset_path {path}: no file found for --training.dataset {name}")
    stats = [(p, Path(p).stat().st_size, Path(p).stat().st_mtime_ns) for p in shards]
    return f"{name} {stats}"
