"""All documents of a run under one running id: lengths for the planner, tokens for those who train on them.

Both are memory-mapped: opening costs milliseconds and no memory of the corpus' size. Reading uses pyarrow alone, so
ranks do not import the datasets library, and may happen from any thread.
"""

import json
import os
from collections.abc import Sequence

import numpy as np

from torchtitan_wlb.config import Training
from torchtitan_wlb.data.prepare import START as FIRST
from torchtitan_wlb.data.prepare import STOP as END
from torchtitan_wlb.data.prepare import SourceSpec, open_store, prepare
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError
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
        num_proc: int = 1,
    ):
        self._specs, self.weights = specs, weights
        self._paths = [prepare(spec, tokenizer, cache, num_proc) for spec in specs]
        self._tables = [np.load(table, mmap_mode="r") for _, table in self._paths]
        self._stores = [open_store(spec, folder) for spec, (folder, _) in zip(self._specs, self._paths)]
        self._about = [json.loads(table.with_suffix(".json").read_text()) for _, table in self._paths]
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
        return [about["counts"] for about in self._about]

    @property
    def content(self) -> str:
        """Hash of all tokens and masks of the sources, in order."""
        return " ".join(about["content"] for about in self._about)

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
