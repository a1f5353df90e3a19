"""All documents of a run as memory-mapped arrays: lengths for the planner, tokens for those who train on them.

1. `prepare` tokenises a source once, with several processes and a progress bar, into Arrow files in the cache (one
   process of a machine works, the others wait on a file lock, no collective involved).
2. The policy for long documents is applied to the lengths: a table of documents (row, start, stop, targets), again in
   the cache.
3. `Documents` maps both; a document id counts through all sources. Opening costs milliseconds and no memory of the
   corpus' size.

Reading uses pyarrow alone: ranks and loader workers do not import the datasets library.
"""

import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from filelock import FileLock

from torchtitan_wlb.config import Training
from torchtitan_wlb.data.sources import SOURCES, source_identity, synthetic_lengths
from torchtitan_wlb.data.token_store import ArrowTokens, FlatTokens, SyntheticTokens
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import logger
from torchtitan_wlb.packing.spans import ID, START, STOP

_START, _STOP = 1, 2  # rows of a document table: row, start, stop, targets


@dataclass(frozen=True)
class SourceSpec:
    """What to prepare: one source and everything its documents depend on."""

    name: str
    path: str
    column: str
    loss_mask_column: str
    seq_len: int
    long_documents: str


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
    table = folder / f"documents-{spec.long_documents}-{spec.seq_len}.npy"
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
                cause = error.__cause__ or error
                raise ConfigError(
                    f"--training.dataset {spec.name}, --training.dataset_path {spec.path or '(none)'} cannot be read: "
                    f"{type(cause).__name__}: {str(cause)[:500]}"
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
    wanted = [c for c in (spec.column, spec.loss_mask_column) if c]
    missing = [c for c in wanted if c not in raw.column_names]
    if missing:
        raise ConfigError(
            f"--training.dataset_column / loss_mask_column {', '.join(missing)}: not in {spec.name} {spec.path}, "
            f"which has {', '.join(raw.column_names)}"
        )
    from datasets import Features, List, Value

    features = {"input_ids": List(Value("int32"))} | (
        {"loss_mask": List(Value("int8"))} if spec.loss_mask_column else {}
    )
    encode = partial(_encode_batch, tokenizer=tokenizer if SOURCES[spec.name].kind == "text" else None, spec=spec)
    encoded = raw.map(
        encode,
        batched=True,
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
    format = "json" if shards[0].endswith((".json", ".jsonl", ".gz")) else "parquet"
    return datasets.load_dataset(format, data_files=shards, split="train", cache_dir=str(scratch))


def _text_rows(shards, read, column):
    for text in read(shards):
        yield {column: text}


def _encode_batch(batch, tokenizer: Tokenizer | None, spec: SourceSpec):
    rows = batch[spec.column]
    out = {"input_ids": tokenizer.encode_documents([r or "" for r in rows]) if tokenizer else [r or [] for r in rows]}
    if spec.loss_mask_column:
        out["loss_mask"] = [[int(m != 0) for m in row or []] for row in batch[spec.loss_mask_column]]
        for ids, mask in zip(out["input_ids"], out["loss_mask"]):
            if len(ids) != len(mask):
                raise ValueError(f"a row has {len(ids)} ids and {len(mask)} entries in {spec.loss_mask_column}")
    return out


def _open_store(spec: SourceSpec, folder: Path):
    if SOURCES[spec.name].kind == "lengths":
        return SyntheticTokens(synthetic_lengths(spec.path))
    if spec.name == "tokens" and spec.path.endswith(".bin"):
        return FlatTokens(Path(spec.path))
    return ArrowTokens(folder / "tokens")


def _prepare_table(spec: SourceSpec, folder: Path, table: Path) -> None:
    store = _open_store(spec, folder)
    rows, counts = apply_length_policy(store.row_lengths, spec.seq_len, spec.long_documents)
    targets = rows[:, _STOP] - rows[:, _START] - 1
    if store.has_mask:
        # Position t predicts token t + 1, so the mask of the first token never counts.
        targets = np.array([int(store.mask(r, a + 1, b).sum()) for r, a, b in rows], dtype=np.int64)
    keep = targets > 0
    counts["no_target"] = int((~keep).sum())
    rows = np.column_stack([rows, targets])[keep].astype(np.int32)
    counts |= {"documents": len(rows), "tokens": int((rows[:, _STOP] - rows[:, _START]).sum())}
    if SOURCES[spec.name].kind == "tokens":
        counts |= dict(zip(("smallest_id", "largest_id"), store.id_range()))
    if not len(rows):
        raise ConfigError(f"--training.dataset {spec.name} {spec.path}: no document with a target is left ({counts})")
    table.with_suffix(".json").write_text(json.dumps(asdict(spec) | {"counts": counts}))
    part = table.with_suffix(".part.npy")
    np.save(part, np.ascontiguousarray(rows.T))
    part.rename(table)


def apply_length_policy(lengths: np.ndarray, seq_len: int, policy: str) -> tuple[np.ndarray, dict[str, int]]:
    """Cut rows into documents of at most seq_len tokens.

    Args:
        lengths: [n] tokens of every row.
        policy: "split" (pieces of seq_len, each a document), "truncate" or "drop".

    Returns:
        ([documents, 3] of row, start, stop in row order, counts: rows, empty, long).
    """
    lengths = lengths.astype(np.int64)
    counts = {
        "rows": len(lengths),
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
    return np.column_stack([row, start, np.minimum(start + seq_len, lengths[row])]), counts


class Documents:
    """The documents of several sources under one running id.

    Args:
        specs: the sources, in id order.
        weights: share of the tokens that each source should have.

    Attributes:
        sizes: documents of each source; ids of source i start at sum(sizes[:i]).
        fingerprint: hash over all lengths; two runs with equal fingerprints pack alike.
    """

    def __init__(
        self,
        specs: list[SourceSpec],
        weights: list[float],
        tokenizer: Tokenizer,
        cache: str,
        num_proc: int = 1,
    ):
        self._specs, self.weights = specs, weights
        self._paths = [prepare(spec, tokenizer, cache, num_proc) for spec in specs]
        self._tables = [np.load(table, mmap_mode="r") for _, table in self._paths]
        self._stores = [_open_store(spec, folder) for spec, (folder, _) in zip(self._specs, self._paths)]
        self.sizes = [t.shape[1] for t in self._tables]
        self._first = np.cumsum([0, *self.sizes])
        for spec, counts in zip(specs, self.counts()):
            if counts.get("largest_id", 0) >= tokenizer.n_ids or counts.get("smallest_id", 0) < 0:
                raise ConfigError(
                    f"--training.dataset {spec.name} {spec.path} has ids {counts['smallest_id']} to "
                    f"{counts['largest_id']}, --model.tokenizer has 0 to {tokenizer.n_ids - 1}"
                )

    def __len__(self) -> int:
        return int(self._first[-1])

    @cached_property
    def fingerprint(self) -> str:
        h = hashlib.sha256()
        for table, weight in zip(self._tables, self.weights):
            h.update(f"{table.shape} {weight}".encode())
            h.update((table[_STOP] - table[_START]).tobytes())
        return h.hexdigest()[:16]

    def counts(self) -> list[dict]:
        """What the policies did, one dict a source: rows, empty, long, no_target, documents, tokens."""
        return [json.loads(t.with_suffix(".json").read_text())["counts"] for _, t in self._paths]

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Tokens of documents, [n] int64 for ids [n]."""
        out = np.empty(len(ids), dtype=np.int64)
        source = np.searchsorted(self._first, ids, side="right") - 1
        for i, table in enumerate(self._tables):
            mine = source == i
            local = ids[mine] - self._first[i]
            out[mine] = table[_STOP, local] - table[_START, local]
        return out

    def _locate(self, id: int):
        i = int(np.searchsorted(self._first, id, side="right")) - 1
        row, start, stop, targets = (int(x) for x in self._tables[i][:, id - self._first[i]])
        return self._stores[i], row, start, stop, targets

    def tokens(self, id: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a document, int32 [stop - start]."""
        store, row, first, _, _ = self._locate(id)
        return store.tokens(row, first + start, first + stop)

    def labels(self, id: int, start: int, stop: int, ignore_index: int) -> np.ndarray:
        """Targets of tokens [start, stop) of a document, int64: the next token of the document, or ignore_index for the
        document's last token and where the next token is masked out."""
        store, row, first, end, _ = self._locate(id)
        out = np.full(stop - start, ignore_index, dtype=np.int64)
        after = min(first + stop + 1, end)
        targets = store.tokens(row, first + start + 1, after).astype(np.int64)
        if store.has_mask:
            targets[store.mask(row, first + start + 1, after) == 0] = ignore_index
        out[: len(targets)] = targets
        return out

    def count_targets(self, spans: np.ndarray) -> int:
        """Valid labels of spans [k, 4]: prepared for whole documents, counted for cut ones."""
        total = 0
        source = np.searchsorted(self._first, spans[:, ID], side="right") - 1
        for i, (table, store) in enumerate(zip(self._tables, self._stores)):
            mine = spans[source == i]
            row, start, stop, targets = table[:, mine[:, ID] - self._first[i]].astype(np.int64)
            is_whole = (mine[:, STOP] - mine[:, START]) == stop - start
            total += int(targets[is_whole].sum())
            first = (start + mine[:, START] + 1)[~is_whole]  # the first token is nobody's target
            after = np.minimum(start + mine[:, STOP] + 1, stop)[~is_whole]
            if store.has_mask:
                cut = zip(row[~is_whole].tolist(), first.tolist(), after.tolist())
                total += sum(int(store.mask(*part).sum()) for part in cut)
            else:
                total += int((after - first).sum())
        return total


def load_documents(
    t: Training,
    tokenizer: Tokenizer,
    names: Sequence[str],
    paths: Sequence[str] = (),
    weights: Sequence[float] = (),
    section: str = "training",
) -> Documents:
    """Prepare (or find in the cache) and map the documents of some sources.

    Args:
        t: column names, context window, policy and cache.
        names, paths, weights: one of each a source; no paths for sources without, no weights for equal shares.
        section: of the configuration, for messages.
    """
    specs = [
        SourceSpec(name, path, t.dataset_column, t.loss_mask_column, t.seq_len, t.long_documents)
        for name, path in zip(names, paths or [""] * len(names))
    ]
    try:
        return Documents(specs, list(weights or [1.0] * len(names)), tokenizer, t.dataset_cache, os.cpu_count() or 1)
    except ConfigError as error:
        raise ConfigError(*(p.replace("--training.dataset", f"--{section}.dataset") for p in error.problems)) from error
