"""Spans as arrays: int64 [n, 4], one row (id, start, stop, arrival) for a part [start, stop) of a document.

A span is the whole document unless a policy cuts it; arrival is the step that drew it. Arrays keep a step of 33,000
documents cheap.
"""

import numpy as np

ID, START, STOP, ARRIVAL = range(4)
NONE = np.zeros((0, 4), dtype=np.int64)


def as_spans(rows) -> np.ndarray:
    """Rows (id, start, stop, arrival) as a span array; [] gives an empty one."""
    return np.asarray(rows, dtype=np.int64).reshape(-1, 4)


def lengths(spans: np.ndarray) -> np.ndarray:
    """Tokens of every span, [n]."""
    return spans[:, STOP] - spans[:, START]


def longest_first(spans: np.ndarray) -> np.ndarray:
    """Spans by falling length; the earlier arrival first among equals."""
    return spans[np.lexsort((spans[:, ARRIVAL], -lengths(spans)))]


def group(spans: np.ndarray, micro_batch: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Spans in the order of their micro-batches.

    Args:
        spans: [k, 4]. micro_batch: [k], 0 .. n - 1.

    Returns:
        (spans [k, 4], bounds [n + 1]): micro-batch b is spans[bounds[b] : bounds[b + 1]].
    """
    order = np.argsort(micro_batch, kind="stable")
    return spans[order], np.searchsorted(micro_batch[order], np.arange(n + 1))
