"""Files of a source as parts, and the rows of a part.

A part is about 32 MB of input that one process reads, in order: lines of a JSON file, one compressed file, row groups
of a Parquet file, an Arrow file, a group of text files, rows of a Hugging Face dataset. Parts depend on names and sizes
alone, so the documents are the same with any number of processes.
"""

import contextlib
import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_wlb.errors import ConfigError

PART_BYTES = 32 << 20  # at most; of a small source a 64th, so that several processes have work
_MARK = b"\xef\xbb\xbf"  # with which some programs begin UTF-8
_ROWS = 64  # of a table that are Python objects at once


@dataclass(frozen=True)
class Part:
    """Some rows of some files.

    Attributes:
        paths: one file, or several whole ones (of text).
        start, stop: bytes of a JSON file, row groups of a Parquet file, rows of a dataset; -1 for all.
        size: bytes, for the progress bar.
    """

    paths: tuple[str, ...]
    start: int
    stop: int
    size: int


# Where it stands, or what says so; {column: value}, or the exception that reading it raised.
Row = tuple[str | Callable[[], str], Any]


def _part_bytes(files: Sequence[str]) -> int:
    total = sum(Path(path).stat().st_size for path in files)
    return min(PART_BYTES, max(total // 64, 1 << 20))


def parts_of_texts(files: Sequence[str]) -> list[Part]:
    """Groups of whole files."""
    parts, group, size, limit = [], [], 0, _part_bytes(files)
    for path in files:
        group.append(path)
        size += Path(path).stat().st_size
        if size >= limit or len(group) == 4096:
            parts.append(Part(tuple(group), -1, -1, size))
            group, size = [], 0
    return [*parts, Part(tuple(group), -1, -1, size)] if group else parts


def parts_of_tables(files: Sequence[str]) -> list[Part]:
    """Parts of JSON, Parquet and Arrow files.

    Raises:
        ConfigError: a Parquet file without a readable footer.
    """
    parts, limit = [], _part_bytes(files)
    for path in files:
        size = Path(path).stat().st_size
        if path.endswith(".parquet"):
            parts += _row_groups(path, limit)
        elif path.endswith((".json", ".jsonl")) and not _is_array(path):
            starts = range(0, max(size, 1), limit)
            parts += [Part((path,), s, min(s + limit, size), min(limit, size - s)) for s in starts]
        else:
            parts.append(Part((path,), -1, -1, size))
    return parts


def _row_groups(path: str, limit: int) -> list[Part]:
    import pyarrow.parquet as pq

    with _readable(path):
        about = pq.read_metadata(path)
    parts, first, size = [], 0, 0
    for i in range(about.num_row_groups):
        size += about.row_group(i).total_byte_size
        if size >= limit or i == about.num_row_groups - 1:
            parts.append(Part((path,), first, i + 1, size))
            first, size = i + 1, 0
    return parts


def _is_array(path: str) -> bool:
    """Whether a JSON file is one list of rows, not one row a line."""
    with open(path, "rb") as file:
        return path.endswith(".json") and file.read(4096).removeprefix(_MARK).lstrip()[:1] == b"["


@contextlib.contextmanager
def _readable(path: str):
    """A file that is cut short or of another kind is the end of it, in one line."""
    try:
        yield
    except Exception as error:  # whatever a reader says of a file that is not what it should be
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--training.dataset_path: {path}: {(str(error).splitlines() or [''])[0][:300]}") from None


def rows_of_table(part: Part, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a part of a JSON, Parquet or Arrow file; of tables only the columns wanted are read.

    Raises:
        ConfigError: the file cannot be read, or its schema has no such column.
    """
    (path,) = part.paths
    with _readable(path):
        if path.endswith(".parquet"):
            yield from _rows_of_parquet(part, columns)
        elif path.endswith(".arrow"):
            yield from _rows_of_arrow(path, columns)
        else:
            yield from _rows_of_json(part)


def check_columns(where: str, has: Sequence[str], columns: Sequence[str]) -> None:
    if missing := [c for c in columns if c not in has]:
        raise ConfigError(f"--training.dataset_column {missing[0]}: not in {where}, which has {', '.join(has)}")


def _rows_of_parquet(part: Part, columns: Sequence[str]) -> Iterator[Row]:
    import pyarrow.parquet as pq

    (path,) = part.paths
    with pq.ParquetFile(path) as file:
        check_columns(path, file.schema_arrow.names, columns)
        number = sum(file.metadata.row_group(i).num_rows for i in range(part.start))
        groups = range(part.start, part.stop)
        for batch in file.iter_batches(_ROWS, row_groups=list(groups), columns=list(columns)):
            for row in _rows_of_batch(batch):
                yield f"{path}, row {number}", row
                number += 1


def _rows_of_batch(batch) -> Iterator[Any]:
    """{column: value} of every row, or why it cannot be read."""
    try:
        yield from batch.to_pylist()
    except ValueError:  # a text that is not UTF-8
        for i in range(batch.num_rows):
            try:
                (row,) = batch.slice(i, 1).to_pylist()
            except ValueError as error:
                row = ValueError(str(error))
            yield row


def _rows_of_arrow(path: str, columns: Sequence[str]) -> Iterator[Row]:
    import pyarrow as pa

    with pa.memory_map(path) as file:
        try:
            reader = pa.ipc.open_stream(file)
            batches: Iterator = iter(reader)
        except pa.ArrowInvalid:
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        check_columns(path, reader.schema.names, columns)
        number = 0
        for batch in batches:
            batch = batch.select(list(columns))
            for start in range(0, batch.num_rows, _ROWS):
                for row in _rows_of_batch(batch.slice(start, _ROWS)):
                    yield f"{path}, row {number}", row
                    number += 1


def _rows_of_json(part: Part) -> Iterator[Row]:
    (path,) = part.paths
    if part.start >= 0:
        yield from (_parse(where, line) for where, line in _lines(path, part.start, part.stop))
        return
    with _open(path) as file:
        head = file.read(1)
        if head == _MARK[:1]:
            file.read(2)
            head = file.read(1)
        while head.isspace():
            head = file.read(1)
        if head == b"[":
            for number, row in enumerate(json.loads(head + file.read())):
                yield _checked(f"{path}, row {number}", row)
        else:
            for number, line in enumerate(_with_head(head, file), 1):
                if line.strip():
                    yield _parse(f"{path}, line {number}", line)


def _with_head(head: bytes, file) -> Iterator[bytes]:
    if head:
        yield head + file.readline()
    yield from file


def _open(path: str):
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        return io.BufferedReader(_Zstandard(path))
    return open(path, "rb")


class _Zstandard(io.RawIOBase):
    """The content of a .zst file; the library's own reader takes a file that is cut short for a whole one."""

    def __init__(self, path: str):
        self._file = open(path, "rb")  # noqa: SIM115
        self._frame: Any = None
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        import zstandard

        while not self._left:
            block = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            block = block or self._file.read(1 << 20)
            if not block:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("ends before its end-of-stream marker")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._left = self._frame.decompress(block)
        n = min(len(buffer), len(self._left))
        buffer[:n], self._left = self._left[:n], self._left[n:]
        return n

    def close(self) -> None:
        self._file.close()
        super().close()


def _lines(path: str, start: int, stop: int) -> Iterator[tuple[Callable[[], str], bytes]]:
    """(where, line) of the lines that begin in [start, stop)."""
    with open(path, "rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()  # the line that began before
        while (at := file.tell()) < stop:
            if (line := file.readline()).strip():
                yield partial(_line_name, path, at), line


def _line_name(path: str, at: int) -> str:
    """Of the line that begins at a byte; counted only where it is told."""
    with open(path, "rb") as file:
        count, left = 1, at
        while left:
            block = file.read(min(left, 1 << 20))
            count, left = count + block.count(b"\n"), left - len(block)
    return f"{path}, line {count}"


def _parse(where, line: bytes) -> Row:
    try:
        return _checked(where, json.loads(line))
    except (ValueError, RecursionError) as error:
        return where, ValueError(str(error))


def _checked(where, row: Any) -> Row:
    return where, row if isinstance(row, dict) else ValueError("not an object")
