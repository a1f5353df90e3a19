"""From a source to memory-mapped files in the cache, once.

1. Text is tokenised, with several processes and a progress bar, into Arrow files (one process of a machine works, the
   others wait on a file lock, no collective involved).
2. The policy for long documents is applied to the lengths: a table of documents (row, start, stop, targets).
"""

import gzip
import hashlib
import importlib.util
import inspect
import json
import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from filelock import FileLock
from pydantic import BaseModel

from torchtitan_wlb.data.sources import JSON, SOURCES, source_identity
from torchtitan_wlb.data.synthetic import synthetic_lengths
from torchtitan_wlb.data.token_store import ArrowTokens, FlatTokens, SyntheticTokens, TokenStore
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import logger

# Rows of a document table: row, start, stop, targets, and where labels end: at the end of the row for a piece of a
# split document, whose last token predicts the first one of the next piece.
START, STOP = 1, 2
_FORMAT = 2  # of the table


@dataclass(frozen=True)
class SourceSpec:
    """What to prepare: one source and everything its documents depend on."""

    name: str
    path: str
    column: str
    loss_mask_column: str
    seq_len: int
    long_documents: str


class TableAbout(BaseModel):
    """The JSON twin of a document table: what was read, what the length policy did, and a hash of all tokens."""

    counts: dict[str, int]
    content: str


def prepare(spec: SourceSpec, tokenizer: Tokenizer, cache: str, num_proc: int = 1) -> tuple[Path, Path]:
    """Make sure that a source is tokenised and its document table exists.

    Returns:
        (token folder, table file) in the cache; the table file has a JSON twin with the counts of the policy.

    Raises:
        ConfigError: no file, no such column, no document left.
    """
    text_only = tokenizer.fingerprint if SOURCES[spec.name].kind == "text" else ""
    reader = SOURCES[spec.name].read
    code = inspect.getsource(reader) if reader else ""  # what a built-in reader calls a document may change
    identity = f"{code} {source_identity(spec.name, spec.path)} {spec.column} {spec.loss_mask_column} {text_only}"
    folder = Path(cache) / f"{spec.name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    table = folder / f"documents{_FORMAT}-{spec.long_documents}-{spec.seq_len}.npy"
    if not table.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--training.dataset_cache {cache}: {error.strerror}") from error
        with FileLock(folder / "lock"):
            try:
                _prepare_tokens(spec, tokenizer, folder, num_proc)
                if not table.exists():
                    _prepare_table(spec, folder, table)
            except ConfigError:
                raise
            except Exception as error:  # whatever a reader says of a file that is not what it should be
                raise ConfigError(
                    f"--training.dataset {spec.name}, --training.dataset_path {spec.path or '(none)'} cannot be read: "
                    f"{_fault(spec) or _reason(error)}"
                ) from error
    return folder, table


def _prepare_tokens(spec: SourceSpec, tokenizer: Tokenizer, folder: Path, num_proc: int) -> None:
    done = folder / "tokens"
    is_flat = spec.name == "tokens" and spec.path.endswith(".bin")
    if done.exists() or SOURCES[spec.name].kind == "lengths" or is_flat:
        return
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    logger.info(f"Tokenising {spec.name} {spec.path} (once; cached in {folder})")
    part = folder / "part"
    shutil.rmtree(part, ignore_errors=True)
    raw = _raw_dataset(spec, part, num_proc)
    from datasets import Features, List, Value

    is_text = SOURCES[spec.name].kind == "text"
    for flag, column in (("dataset_column", spec.column), ("loss_mask_column", spec.loss_mask_column)):
        if not column:
            continue
        if column not in raw.column_names:
            raise ConfigError(
                f"--training.{flag} {column}: not in {spec.name} {spec.path}, which has {', '.join(raw.column_names)}"
            )
        held, wants = raw.features[column], "text" if is_text else "lists of integers"
        kind = getattr(held if is_text else getattr(held, "feature", None), "dtype", "")
        if not kind.startswith(("string", "large_string", "null") if is_text else ("int", "uint", "bool")):
            raise ConfigError(f"--training.{flag} {column}: {spec.path} holds {held} there, not {wants}")

    features = {"input_ids": List(Value("int32"))} | (
        {"loss_mask": List(Value("int8"))} if spec.loss_mask_column else {}
    )
    encode = partial(_encode_batch, tokenizer=tokenizer if is_text else None, spec=spec)
    encoded = raw.map(
        encode,
        batched=True,
        with_indices=True,
        num_proc=num_proc if num_proc > 1 else None,
        remove_columns=raw.column_names,
        features=Features(features),
        desc="Tokenising",
    )
    encoded.save_to_disk(str(part / "tokens"))
    del raw, encoded
    (part / "tokens").rename(done)
    shutil.rmtree(part, ignore_errors=True)


def _raw_dataset(spec: SourceSpec, scratch: Path, num_proc: int):
    """The source as a `datasets.Dataset` with its text or id column."""
    import datasets

    source = SOURCES[spec.name]
    if source.read is not None:
        shards = source.shards(spec.path)
        generate = partial(_text_rows, read=source.read, column=spec.column)
        workers = min(num_proc, len(shards))
        return datasets.Dataset.from_generator(
            generate,
            gen_kwargs={"shards": shards},
            cache_dir=str(scratch),
            num_proc=workers if workers > 1 else None,
        )
    if spec.name == "hf":
        return datasets.load_dataset(spec.path, split="train")
    shards = source.shards(spec.path)
    format = "json" if shards[0].endswith(JSON) else "parquet"
    return datasets.load_dataset(format, data_files=shards, split="train", cache_dir=str(scratch))


def _text_rows(shards, read, column):
    for text in read(shards):
        yield {column: text}


def _encode_batch(batch, indices: list[int], tokenizer: Tokenizer | None, spec: SourceSpec):
    rows = batch[spec.column]
    if tokenizer:
        out = {"input_ids": tokenizer.encode_documents([r or "" for r in rows])}
    else:
        out = {"input_ids": [r or [] for r in rows]}
        for i, ids in zip(indices, out["input_ids"]):
            if None in ids or max(ids, default=0) >= 2**31 or min(ids, default=0) < -(2**31):
                raise ValueError(f"row {i} has an id that is null or too large")
    if spec.loss_mask_column:
        out["loss_mask"] = [[int(m != 0) for m in row or []] for row in batch[spec.loss_mask_column]]
        for i, ids, mask in zip(indices, out["input_ids"], out["loss_mask"]):
            if len(ids) != len(mask):
                raise ValueError(f"row {i} has {len(ids)} ids and {len(mask)} entries in {spec.loss_mask_column}")
    return out


def _reason(error: BaseException) -> str:
    """What went wrong, without the traceback that another process sends along."""
    cause = error.__cause__ if type(error.__cause__).__name__ not in ("RemoteTraceback", "NoneType") else error
    text = str(cause).strip().splitlines() or ["no reason given"]
    return f"{type(cause).__name__}: {text[0][:300]}"


def _fault(spec: SourceSpec) -> str:
    """File, line and reason of the first thing in a source's files that cannot be parsed, "" if all can."""
    import pyarrow.parquet

    for path in SOURCES[spec.name].shards(spec.path):
        try:
            if path.endswith(".zst") and importlib.util.find_spec("zstandard") is None:
                return f"{path}: pip install zstandard to read it"
            if path.endswith((".jsonl", ".jsonl.gz")):
                with (gzip.open if path.endswith(".gz") else open)(path, "rb") as lines:
                    for number, line in enumerate(lines, 1):
                        try:
                            if not isinstance(json.loads(line), dict):
                                raise ValueError("not an object")
                        except ValueError as error:
                            return f"{path}, line {number}: {error}"
            elif path.endswith(".parquet"):
                pyarrow.parquet.read_schema(path)
            elif path.endswith(".json"):
                json.loads(Path(path).read_bytes())
        except (OSError, EOFError, ValueError, pyarrow.ArrowException) as error:
            return f"{path}: {str(error).splitlines()[0][:300]}"
    return ""


def open_store(spec: SourceSpec, folder: Path) -> TokenStore:
    if SOURCES[spec.name].kind == "lengths":
        return SyntheticTokens(synthetic_lengths(spec.path))
    if spec.name == "tokens" and spec.path.endswith(".bin"):
        return FlatTokens(Path(spec.path))
    return ArrowTokens(folder / "tokens")


def _prepare_table(spec: SourceSpec, folder: Path, table: Path) -> None:
    store = open_store(spec, folder)
    rows, counts = apply_length_policy(store.row_lengths, spec.seq_len, spec.long_documents)
    row, start, stop = rows.T
    end = store.row_lengths[row] if spec.long_documents == "split" else stop
    # Token t predicts token t + 1, so the first token is nobody's target.
    first, after = start + 1, np.minimum(stop + 1, end)
    targets = after - first
    if store.has_mask:
        targets = np.array([int(store.mask(*part).sum()) for part in zip(row, first, after)], dtype=np.int64)
    keep = targets > 0
    counts |= {"no_target": int((~keep).sum()), "no_target_tokens": int((stop - start)[~keep].sum())}
    rows = np.column_stack([rows, targets, end])[keep].astype(np.int32)
    counts |= {"documents": len(rows), "tokens": int((rows[:, STOP] - rows[:, START]).sum())}
    if SOURCES[spec.name].kind == "tokens":
        counts |= dict(zip(("smallest_id", "largest_id"), store.id_range()))
    if not len(rows):
        raise ConfigError(f"--training.dataset {spec.name} {spec.path}: no document with a target is left ({counts})")
    table.with_suffix(".json").write_text(TableAbout(counts=counts, content=store.content()).model_dump_json())
    part = table.with_suffix(".part.npy")
    np.save(part, np.ascontiguousarray(rows.T))
    part.rename(table)


def apply_length_policy(lengths: np.ndarray, seq_len: int, policy: str) -> tuple[np.ndarray, dict[str, int]]:
    """Cut rows into documents of at most seq_len tokens.

    Args:
        lengths: [n] tokens of every row.
        policy: "split" (pieces of seq_len, each a document), "truncate" or "drop".

    Returns:
        ([documents, 3] of row, start, stop in row order, counts: rows and tokens read, empty rows, long rows, tokens
        dropped).
    """
    lengths = lengths.astype(np.int64)
    counts = {
        "rows": len(lengths),
        "tokens_read": int(lengths.sum()),
        "empty": int((lengths == 0).sum()),
        "long": int((lengths > seq_len).sum()),
    }
    if policy == "split":
        pieces = -(-lengths // seq_len)
    elif policy == "truncate":
        pieces = (lengths > 0).astype(np.int64)
    else:
        pieces = ((lengths > 0) & (lengths <= seq_len)).astype(np.int64)
    row = np.repeat(np.arange(len(lengths)), pieces)
    piece = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = piece * seq_len
    stop = np.minimum(start + seq_len, lengths[row])
    return np.column_stack([row, start, stop]), counts | {"dropped_tokens": int(lengths.sum() - (stop - start).sum())}
