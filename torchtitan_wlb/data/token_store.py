"""Rows of token ids behind one interface: `row_lengths`, `tokens(row, start, stop)`, `mask(...)` where `has_mask`, and
`content()`, a hash of all of it."""

import hashlib
import resource
import struct
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from torchtitan_wlb.errors import ConfigError, first_reason


def _hash(arrays: Iterable[np.ndarray]) -> str:
    h = hashlib.blake2b(digest_size=8)
    for array in arrays:
        h.update(str(array.shape).encode())
        if array.size:
            h.update(np.ascontiguousarray(array).data)
    return h.hexdigest()


def _allow_open_files(n: int) -> None:
    """A file that is mapped stays open: raise the limit of this process where n more would not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and n + 512 > soft:
        wanted = n + 512 if hard == resource.RLIM_INFINITY else min(n + 512, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ArrowTokens:
    """Rows of token ids (and optional 0/1 masks) in Arrow files, sliced without copying."""

    def __init__(self, folder: Path):
        import pyarrow as pa

        self._ids: list[tuple[np.ndarray, np.ndarray]] = []
        self._masks: list[tuple[np.ndarray, np.ndarray]] = []
        files = sorted(folder.glob("*.arrow"))
        _allow_open_files(len(files))
        for path in files:
            table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
            for name, chunks in (("input_ids", self._ids), ("loss_mask", self._masks)):
                if name in table.column_names:
                    for c in table.column(name).chunks:
                        chunks.append((c.values.to_numpy(zero_copy_only=True), c.offsets.to_numpy()))
        self._first = np.cumsum([0, *(len(offsets) - 1 for _, offsets in self._ids)])
        self.has_mask = bool(self._masks)

    @cached_property
    def row_lengths(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *(np.diff(offsets) for _, offsets in self._ids)]).astype(np.int32)

    def id_range(self) -> tuple[int, int]:
        """Smallest and largest id of the whole store."""
        parts = [values for values, _ in self._ids if len(values)]
        return min((int(v.min()) for v in parts), default=0), max((int(v.max()) for v in parts), default=0)

    def content(self) -> str:
        """Hash of all ids and masks."""
        return _hash(values for chunks in (self._ids, self._masks) for part in chunks for values in part)

    def _slice(self, chunks, row: int, start: int, stop: int) -> np.ndarray:
        c = int(np.searchsorted(self._first, row, side="right")) - 1
        values, offsets = chunks[c]
        first = int(offsets[row - self._first[c]])
        return values[first + start : first + stop]

    def tokens(self, row: int, start: int, stop: int) -> np.ndarray:
        return self._slice(self._ids, row, start, stop)

    def mask(self, row: int, start: int, stop: int) -> np.ndarray:
        return self._slice(self._masks, row, start, stop)


class _FlatHeader(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"]
    lengths: list[Annotated[int, Field(ge=0, lt=2**31)]]


class FlatTokens:
    """A flat file X.bin of ids with X.json beside it: {"dtype": "uint16", "lengths": [...]}."""

    has_mask = False

    def __init__(self, path: Path):
        try:
            header = _FlatHeader.model_validate_json(path.with_suffix(".json").read_bytes())
            self._ids = np.memmap(path, dtype=header.dtype, mode="r")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f'--training.dataset_path {path}: its .json must be {{"dtype": "uint16", "lengths": [...]}} '
                f"({first_reason(error)})"
            ) from error
        self.row_lengths = np.asarray(header.lengths, dtype=np.int32)
        self._offsets = np.concatenate([[0], np.cumsum(self.row_lengths, dtype=np.int64)])
        if self._offsets[-1] != len(self._ids):
            raise ConfigError(
                f"--training.dataset_path {path}: {len(self._ids)} ids, but the lengths in "
                f"{path.with_suffix('.json')} add up to {self._offsets[-1]}"
            )

    def tokens(self, row: int, start: int, stop: int) -> np.ndarray:
        first = self._offsets[row]
        return self._ids[first + start : first + stop].astype(np.int32)

    def mask(self, row: int, start: int, stop: int) -> np.ndarray:
        raise NotImplementedError("a flat token file has no loss mask")

    def id_range(self) -> tuple[int, int]:
        return int(self._ids.min()), int(self._ids.max())

    def content(self) -> str:
        return _hash([self._ids, self.row_lengths])


class MegatronTokens(FlatTokens):
    """X.bin of ids with X.idx beside it, as Megatron writes them: one document a document there, of one or several
    sequences that follow each other in the file."""

    _TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

    def __init__(self, path: Path):
        try:
            index = path.with_suffix(".idx").read_bytes()
            magic, version, code, n, entries = struct.unpack_from("<9sQBQQ", index)
            if magic != b"MMIDIDX\0\0" or version != 1 or code not in self._TYPES:
                raise ValueError("it is none, or of another version or type of ids")
            lengths = np.frombuffer(index, np.int32, n, 34)
            starts = np.frombuffer(index, np.int64, n, 34 + 4 * n)
            bounds = np.frombuffer(index, np.int64, entries, 34 + 12 * n)
            self._ids = np.memmap(path, dtype=self._TYPES[code], mode="r")
            ends = np.append(np.cumsum(lengths, dtype=np.int64), 0)[np.arange(-1, n)]  # with 0 in front
            if (lengths < 0).any() or (starts != ends[:-1] * self._ids.itemsize).any() or ends[-1] != len(self._ids):
                raise ValueError(f"its sequences are not what lies in {path.name} one after the other")
            if bounds[:1].tolist() != [0] or bounds[-1] != n or (np.diff(bounds) < 0).any():
                raise ValueError("its documents are not all of its sequences in order")
            self._offsets = ends[bounds]
            rows = np.diff(self._offsets)
            if (rows >= 2**31).any():
                raise ValueError("a document has more than 2^31 ids")
        except (OSError, ValueError, struct.error) as error:
            raise ConfigError(f"--training.dataset_path {path}: its .idx cannot be used ({error})") from error
        self.row_lengths = rows.astype(np.int32)


class SyntheticTokens:
    """Random bytes with given lengths, made when they are read."""

    has_mask = False

    def __init__(self, lengths: np.ndarray):
        self.row_lengths = lengths

    def tokens(self, row: int, start: int, stop: int) -> np.ndarray:
        return np.random.default_rng(row).integers(0, 256, stop, dtype=np.int32)[start:]

    def id_range(self) -> tuple[int, int]:
        return 0, 255

    def content(self) -> str:
        return _hash([self.row_lengths])

    def mask(self, row: int, start: int, stop: int) -> np.ndarray:
        raise NotImplementedError("synthetic documents have no loss mask")


TokenStore = ArrowTokens | FlatTokens | SyntheticTokens  # MegatronTokens is flat
