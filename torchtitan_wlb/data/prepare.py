"""From a source to memory-mapped files in the cache, once.

1. The parts of the source are tokenised, each by one process into an Arrow file of its own, so that a preparation that
   was interrupted goes on with the parts that are missing. One process of a machine works, the others wait on a file
   lock, no collective involved.
2. The policy for long documents is applied to the lengths: a table of documents (row, start, stop, targets).
"""

import hashlib
from pathlib import Path

import numpy as np
from filelock import FileLock
from pydantic import BaseModel

from torchtitan_wlb.data.source_spec import SourceSpec
from torchtitan_wlb.data.sources import is_flat
from torchtitan_wlb.data.synthetic import synthetic_lengths
from torchtitan_wlb.data.token_store import ArrowTokens, FlatTokens, MegatronTokens, SyntheticTokens, TokenStore
from torchtitan_wlb.data.tokenize_parts import PartWriter, tokenize_parts
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import logger

# Rows of a document table: row, start, stop, targets, and where labels end: at the end of the row for a piece of a
# split document, whose last token predicts the first one of the next piece.
START, STOP = 1, 2
_FORMAT = 2  # of the table


class TableAbout(BaseModel):
    """The JSON twin of a document table: what was read, what the length policy did, and a hash of all tokens."""

    counts: dict[str, int]
    content: str


def prepare(spec: SourceSpec, tokenizer: Tokenizer, cache: str, processes: int = 1) -> tuple[Path, Path]:
    """Make sure that a source is tokenised and its document table exists.

    Returns:
        (token folder, table file) in the cache; the table file has a JSON twin with the counts of the policy.

    Raises:
        ConfigError: no file, no such column, a bad row, no document left.
    """
    identity = spec.identity(tokenizer)
    folder = Path(cache) / f"{spec.name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    table = folder / f"documents{_FORMAT}-{spec.long_documents}-{spec.seq_len}.npy"
    if not table.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--training.dataset_cache {cache}: {error.strerror}") from error
        with FileLock(folder / "lock"):
            try:
                bad = _prepare_tokens(spec, tokenizer, folder, processes)
                if not table.exists():
                    _prepare_table(spec, folder, table, bad)
            except ConfigError:
                raise
            except Exception as error:  # whatever a reader says of a file that is not what it should be
                reason = (str(error).strip().splitlines() or ["no reason given"])[0][:300]
                raise ConfigError(
                    f"--training.dataset {spec.name}, --training.dataset_path {spec.path or '(none)'} cannot be read: "
                    f"{type(error).__name__}: {reason}"
                ) from error
    return folder, table


def _prepare_tokens(spec: SourceSpec, tokenizer: Tokenizer, folder: Path, processes: int) -> int:
    """Tokenise the parts that are missing; returns how many rows were skipped in all."""
    done = folder / "tokens"
    if spec.source.kind == "lengths" or is_flat(spec.name, spec.path):
        return 0
    writer = PartWriter(spec, tokenizer, folder / "part")
    if not done.exists():
        logger.info(f"Tokenising {spec.name} {spec.path} (once; cached in {folder})")
        tokenize_parts(writer, spec.parts(), processes)
        (folder / "part").rename(done)
    return writer.bad_rows(done)


def open_store(spec: SourceSpec, folder: Path) -> TokenStore:
    if spec.source.kind == "lengths":
        return SyntheticTokens(synthetic_lengths(spec.path))
    if is_flat(spec.name, spec.path):
        return (MegatronTokens if spec.name == "megatron" else FlatTokens)(Path(spec.path))
    return ArrowTokens(folder / "tokens")


def _prepare_table(spec: SourceSpec, folder: Path, table: Path, bad_rows: int) -> None:
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
    counts |= {"bad_rows": bad_rows} if bad_rows else {}
    counts |= {"no_target": int((~keep).sum()), "no_target_tokens": int((stop - start)[~keep].sum())}
    rows = np.column_stack([rows, targets, end])[keep].astype(np.int32)
    counts |= {"documents": len(rows), "tokens": int((rows[:, STOP] - rows[:, START]).sum())}
    if spec.name in ("tokens", "megatron"):
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
