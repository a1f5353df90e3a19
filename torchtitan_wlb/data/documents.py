"""All documents of a run under one running id: lengths for the planner, tokens for those who train on them.

Both are memory-mapped: opening costs milliseconds and no memory of the corpus' size. Reading uses pyarrow alone, so
ranks do not import the datasets library, and may happen from any thread.
"""

import re
from pathlib import Path

import numpy as np

from torchtitan_wlb.config import Training, Validation
from torchtitan_wlb.data.prepare import START as FIRST
from torchtitan_wlb.data.prepare import STOP as END
from torchtitan_wlb.data.prepare import TableAbout, open_store, prepare
from torchtitan_wlb.data.source_spec import SourceSpec
from torchtitan_wlb.data.token_store import TokenStore
from torchtitan_wlb.data.tokenize_parts import usable_processors
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError, first_reason
from torchtitan_wlb.packing.spans import ID, START, STOP


class Documents:
    """The documents of several sources under one running id.

    Args:
        specs: the sources, in id order.
        weights: share of the tokens that each source should have.

    Attributes:
        sizes: documents of each source; ids of source i start at sum(sizes[:i]).
    """

    def __init__(
        self,
        specs: list[SourceSpec],
        weights: list[float],
        tokenizer: Tokenizer,
        cache: str,
        processes: int = 1,
    ):
        self._specs, self.weights = specs, weights
        paths = [prepare(spec, tokenizer, cache, processes) for spec in specs]
        opened = [_open(spec, folder, table) for spec, (folder, table) in zip(specs, paths)]
        self._stores, self._tables, self._about = zip(*opened)
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

    def counts(self) -> list[dict]:
        """What was read and what the policies did, one dict a source: tokens_read = tokens (of documents) +
        dropped_tokens + no_target_tokens."""
        return [about.counts for about in self._about]

    @property
    def content(self) -> str:
        """Hash of all tokens and masks of the sources, in order."""
        return " ".join(about.content for about in self._about)

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Tokens of documents, [n] int64 for ids [n]."""
        out = np.empty(len(ids), dtype=np.int64)
        source = np.searchsorted(self._first, ids, side="right") - 1
        for i, table in enumerate(self._tables):
            mine = source == i
            local = ids[mine] - self._first[i]
            out[mine] = table[END, local] - table[FIRST, local]
        return out

    def _locate(self, id: int):
        i = int(np.searchsorted(self._first, id, side="right")) - 1
        row, start, _, _, labels_end = (int(x) for x in self._tables[i][:, id - self._first[i]])
        return self._stores[i], row, start, labels_end

    def tokens(self, id: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a document, int32 [stop - start]."""
        store, row, first, _ = self._locate(id)
        return store.tokens(row, first + start, first + stop)

    def labels(self, id: int, start: int, stop: int, ignore_index: int) -> np.ndarray:
        """Targets of tokens [start, stop) of a document, int64: the next token, or ignore_index after the document's
        last token (a piece of a split document is followed by the next piece) and where that token is masked out."""
        store, row, first, end = self._locate(id)
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
            row, start, stop, targets, end = table[:, mine[:, ID] - self._first[i]].astype(np.int64)
            is_whole = (mine[:, STOP] - mine[:, START]) == stop - start
            total += int(targets[is_whole].sum())
            first = (start + mine[:, START] + 1)[~is_whole]  # the first token is nobody's target
            after = np.minimum(start + mine[:, STOP] + 1, end)[~is_whole]
            if store.has_mask:
                cut = zip(row[~is_whole].tolist(), first.tolist(), after.tolist())
                total += sum(int(store.mask(*part).sum()) for part in cut)
            else:
                total += int((after - first).sum())
        return total


def _open(spec: SourceSpec, folder: Path, table: Path) -> tuple[TokenStore, np.ndarray, TableAbout]:
    """Map what the cache has of a source, if it is what was put there."""
    try:
        about = TableAbout.model_validate_json(table.with_suffix(".json").read_bytes())
        documents = np.load(table, mmap_mode="r", allow_pickle=False)
        if documents.dtype != np.int32 or documents.shape != (5, about.counts["documents"]):
            raise ValueError(f"{table.name} is {documents.dtype} {documents.shape}")
        store = open_store(spec, folder)
        if len(store.row_lengths) != about.counts["rows"]:
            raise ValueError(f"{len(store.row_lengths)} rows of {about.counts['rows']}")
    except ConfigError:
        raise
    except Exception as error:  # whatever numpy, pyarrow and pydantic say of a file that was cut or changed
        reason = first_reason(error).splitlines()[0][:200]
        raise ConfigError(f"--training.dataset_cache: {folder} is damaged ({reason}); delete it") from error
    return store, documents, about


PER_SOURCE = ("dataset_column", "dataset_format", "dataset_config", "dataset_split")  # one for all, or one each


def load_documents(
    t: Training, tokenizer: Tokenizer, held_out: Validation | None = None, chat_template: str = ""
) -> Documents:
    """Prepare (or find in the cache) and map the documents to train on, or those held out.

    Args:
        t: context window, policy and cache of both.
        chat_template: model.chat_template.
    """
    of = held_out or t
    specs = []
    for i, (name, path) in enumerate(zip(of.dataset, of.dataset_path or [""] * len(of.dataset))):
        if name == "megatron":  # its .bin, its .idx or what both begin with
            path = path.removesuffix(".idx").removesuffix(".bin") + ".bin"
        column, format, config, split = (values[i % len(values)] for values in (getattr(of, k) for k in PER_SOURCE))
        specs.append(
            SourceSpec(
                name,
                path,
                column,
                of.loss_mask_column,
                t.seq_len,
                t.long_documents,
                format,
                chat_template,
                config,
                split,
                t.bad_rows,
                held_out is not None,
            )
        )
    weights = [1.0] * len(specs) if held_out else list(t.dataset_weight or [1.0] * len(specs))
    processes = usable_processors() if t.prepare_processes == -1 else t.prepare_processes
    try:
        return Documents(specs, weights, tokenizer, t.dataset_cache, processes)
    except ConfigError as error:
        section = "validation" if held_out else "training"
        flag = r"--training\.(?=(dataset|dataset_\w+|loss_mask_column)\b)"
        raise ConfigError(*(re.sub(flag, f"--{section}.", p) for p in error.problems)) from error
