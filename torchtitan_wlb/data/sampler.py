"""Document order: an endless, seeded shuffle of every epoch, without a list of the corpus.

The order of an epoch is a permutation computed position by position: a Feistel network over the smallest even number of
bits that holds n, walked until the result is below n (cycle walking). So the state is a cursor per source, and any
position costs the same.
Several sources are mixed by tokens: the next document comes from the source that is furthest behind its share.
"""

import numpy as np

_ROUNDS = 6
_BLOCK = 1024


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


class DocumentOrder:
    """Draws document ids.

    Args:
        sizes: documents of every source; ids run through the sources.
        weights: share of tokens of every source.
        lengths: function from ids [k] to tokens [k].
        seed: of the shuffle.
        epochs: passes over every source, 0 for endless.
    """

    def __init__(self, sizes: list[int], weights: list[float], lengths, seed: int, epochs: int = 0):
        self.sizes, self.weights, self._lengths, self.seed, self.epochs = (
            sizes,
            weights,
            lengths,
            seed,
            epochs,
        )
        self.cursor = [0] * len(sizes)  # documents drawn of every source, all epochs
        self.drawn_tokens = [0] * len(sizes)
        self._blocks: list[tuple[int, list[int], list[int]]] = [(-1, [], [])] * len(sizes)

    def next(self) -> tuple[int, int] | None:
        """(id, tokens) of the next document, None after the last epoch."""
        open_sources = [i for i, n in enumerate(self.sizes) if not self.epochs or self.cursor[i] < n * self.epochs]
        if not open_sources:
            return None
        i = min(open_sources, key=lambda i: self.drawn_tokens[i] / self.weights[i])
        epoch, position = divmod(self.cursor[i], self.sizes[i])
        block, offset = divmod(position, _BLOCK)
        number = epoch * (self.sizes[i] // _BLOCK + 1) + block
        if self._blocks[i][0] != number:
            positions = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self.sizes[i]))
            drawn = permute(positions, self.sizes[i], (self.seed, i, epoch)) + sum(self.sizes[:i])
            self._blocks[i] = (number, drawn.tolist(), self._lengths(drawn).tolist())
        _, ids, lengths = self._blocks[i]
        self.cursor[i] += 1
        self.drawn_tokens[i] += lengths[offset]
        return ids[offset], lengths[offset]

    def state(self) -> dict:
        return {"cursor": list(self.cursor), "drawn_tokens": list(self.drawn_tokens)}

    def restore(self, state: dict) -> None:
        self.cursor, self.drawn_tokens = list(state["cursor"]), list(state["drawn_tokens"])
