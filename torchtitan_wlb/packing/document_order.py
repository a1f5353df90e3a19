"""Document order: an endless, seeded shuffle of every epoch, without a list of the corpus; or a stream's own order.

The order of an epoch is a permutation computed position by position: a Feistel network over the smallest even number of
bits that holds n, walked until the result is below n (cycle walking). So the state is a cursor per source, and any
position costs the same.
Several sources are mixed by tokens: the next document comes from the source that is furthest behind its share.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

import numpy as np

_ROUNDS = 6
_BLOCK = 4096


def permute(positions: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """A pseudo-random permutation of range(n), evaluated at positions [k]; int64 [k]."""
    half = max(1, (int(n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = np.random.default_rng(key).integers(0, 1 << 63, _ROUNDS, dtype=np.uint64)
    out = positions.astype(np.uint64)
    todo = np.arange(len(out))
    while len(todo):
        x = out[todo]
        left, right = x >> np.uint64(half), x & mask
        for k in keys:
            h = (right ^ k) * np.uint64(0x9E3779B97F4A7C15)
            h ^= h >> np.uint64(29)
            h *= np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((h >> np.uint64(32)) & mask)
        out[todo] = (left << np.uint64(half)) | right
        todo = todo[out[todo] >= n]
    return out.astype(np.int64)


class Order(Protocol):
    """The order in which documents are drawn: look ahead with `peek`, draw with `advance`."""

    drawn_tokens: list[int]  # of every source

    def peek(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """The next documents, as many as it takes to reach some tokens (all that are left, if they do not).

        Returns:
            (ids [k], lengths [k]) in order; the last one is the first to reach `tokens`.
        """

    def advance(self, ids: np.ndarray) -> None:
        """Draw the documents that `peek` showed first (a prefix of its ids)."""

    @property
    def exhausted(self) -> bool:
        """Whether every document has been drawn."""

    def tokens_of(self, ids: np.ndarray) -> np.ndarray:
        """Most tokens that documents [k] may have, [k]. Raises ValueError for ids that do not exist."""

    def state(self) -> dict: ...

    def restore(self, state: dict) -> None:
        """Raises ValueError for what `state` cannot have returned."""


class DocumentOrder(Order):
    """A shuffle of the documents of some sources.

    Args:
        sizes: documents of every source; ids run through the sources.
        weights: share of tokens of every source.
        lengths: function from ids [k] to tokens [k].
        seed: of the shuffle.
        epochs: passes over every source, 0 for endless.

    Attributes:
        cursor: documents drawn of every source, all epochs.
        drawn_tokens: their tokens.
    """

    def __init__(
        self,
        sizes: list[int],
        weights: list[float],
        lengths: Callable[[np.ndarray], np.ndarray],
        seed: int,
        epochs: int = 0,
    ):
        self.sizes, self.weights, self.lengths, self.seed, self.epochs = sizes, weights, lengths, seed, epochs
        self.restore({"cursor": [0] * len(sizes), "drawn_tokens": [0] * len(sizes)})

    def peek(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        keys, ids, lengths = [], [], []
        for i in range(len(self.sizes)):
            self._buffer(i, tokens)
            length = self._ahead[i][1]
            before = self.drawn_tokens[i] + np.cumsum(length) - length
            keys.append(before / self.weights[i])
            ids.append(self._ahead[i][0])
            lengths.append(length)
        order = np.argsort(np.concatenate(keys), kind="stable")
        merged = np.concatenate(lengths)[order]
        k = int(np.searchsorted(np.cumsum(merged), tokens)) + 1 if tokens > 0 else 0
        return np.concatenate(ids)[order][:k], merged[:k]

    def advance(self, ids: np.ndarray) -> None:
        first = np.cumsum([0, *self.sizes])
        source = np.searchsorted(first, ids, side="right") - 1
        for i, k in enumerate(np.bincount(source, minlength=len(self.sizes)).tolist()):
            self.cursor[i] += k
            self.drawn_tokens[i] += int(self._ahead[i][1][:k].sum())
            self._ahead[i] = (self._ahead[i][0][k:], self._ahead[i][1][k:])

    @property
    def exhausted(self) -> bool:
        return bool(self.epochs) and all(c >= n * self.epochs for c, n in zip(self.cursor, self.sizes))

    def _buffer(self, i: int, tokens: int) -> None:
        """Know at least `tokens` tokens of source i ahead of its cursor, or all that are left."""
        n, first = self.sizes[i], sum(self.sizes[:i])
        ids, lengths = ([part] for part in self._ahead[i])
        known, position = int(lengths[0].sum()), self.cursor[i] + len(ids[0])
        while known < tokens and not (self.epochs and position >= n * self.epochs):
            epoch, start = divmod(position, n)
            new = permute(np.arange(start, min(start + _BLOCK, n)), n, (self.seed, i, epoch)) + first
            if n == 1:  # many epochs at once
                new = np.full(min(_BLOCK, self.epochs - position if self.epochs else _BLOCK), first)
            ids.append(new)
            lengths.append(self.lengths(new))
            known, position = known + int(lengths[-1].sum()), position + len(new)
        self._ahead[i] = (np.concatenate(ids), np.concatenate(lengths))

    def state(self) -> dict:
        return {"cursor": list(self.cursor), "drawn_tokens": list(self.drawn_tokens)}

    def tokens_of(self, ids: np.ndarray) -> np.ndarray:
        if ((ids < 0) | (ids >= sum(self.sizes))).any():
            raise ValueError("a document that does not exist")
        return self.lengths(ids)

    def restore(self, state: dict) -> None:
        self.cursor, self.drawn_tokens = list(state["cursor"]), list(state["drawn_tokens"])
        if not len(self.cursor) == len(self.drawn_tokens) == len(self.sizes):
            raise ValueError(f"{len(self.cursor)} sources, not {len(self.sizes)}")
        if any(t < c or (c == 0 and t) for c, t in zip(self.cursor, self.drawn_tokens)):
            raise ValueError(f"{self.drawn_tokens} tokens of {self.cursor} documents")
        if self.epochs and any(c > n * self.epochs for c, n in zip(self.cursor, self.sizes)):
            raise ValueError(f"{self.cursor} documents drawn of {self.sizes} in {self.epochs} epochs")
        nothing = np.zeros(0, dtype=np.int64)
        self._ahead = [(nothing, nothing)] * len(self.sizes)


class StreamOrder(Order):
    """Documents as an iterator of lengths gives them; ids count from 0. To go on from a state, give an iterator that
    starts at the first document again: what was drawn is passed over."""

    def __init__(self, lengths: Iterator[int]):
        self._lengths = lengths
        self._ahead: list[int] = []
        self._ended = False
        self.cursor, self.drawn_tokens = 0, [0]

    def peek(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        known, k = 0, 0
        while known < tokens and (k < len(self._ahead) or self._read()):
            known, k = known + self._ahead[k], k + 1
        return np.arange(self.cursor, self.cursor + k), np.array(self._ahead[:k], dtype=np.int64)

    def advance(self, ids: np.ndarray) -> None:
        self.drawn_tokens[0] += sum(self._ahead[: len(ids)])
        self.cursor += len(ids)
        del self._ahead[: len(ids)]

    @property
    def exhausted(self) -> bool:
        return not self._ahead and not self._read()

    def tokens_of(self, ids: np.ndarray) -> np.ndarray:
        if ((ids < 0) | (ids >= self.cursor)).any():
            raise ValueError("a document that has not been drawn")
        return np.full(len(ids), self.drawn_tokens[0])

    def _read(self) -> bool:
        length = None if self._ended else next(self._lengths, None)
        self._ended = length is None
        if length is not None:
            self._ahead.append(int(length))
        return not self._ended

    def state(self) -> dict:
        return {"cursor": [self.cursor], "drawn_tokens": list(self.drawn_tokens)}

    def restore(self, state: dict) -> None:
        (cursor,), tokens = state["cursor"], state["drawn_tokens"]
        passed = sum(islice(self._lengths, cursor - self.cursor))
        self.cursor, self.drawn_tokens = cursor, [self.drawn_tokens[0] + passed]
        if self.drawn_tokens != tokens:
            raise ValueError(f"{tokens} tokens of {cursor} documents, which have {self.drawn_tokens}")
