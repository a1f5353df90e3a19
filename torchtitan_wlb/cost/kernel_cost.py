"""Predicted time of attention chunks and of the K/V exchange, for choosing shard plans (WLB-LLM §5.2, §5.3). No torch.

    seconds(q, k) = FLOPs of q queries, padded to the kernel's tile, that end at key k  /  rate(q, k)

The rate is interpolated over a grid of (query, key) lengths, bilinear in their logarithms; outside the grid the nearest
rate is used.
"""

import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property

import numpy as np

from torchtitan_wlb.cost.devices import Device

SHORT_QUERIES = 0.7  # share of the rate that chunks of less than two tiles reach (no shared K/V loads, WLB-LLM §5.2)


@dataclass(frozen=True)
class KernelCost:
    """Cost of one attention layer on one rank, forward and backward.

    Attributes:
        pair_flops: FLOPs of a (query, key) pair, all local heads, forward and backward.
        tile: queries of a kernel tile.
        q_knots, k_knots: lengths of the grid, rising; rates: FLOP/s at every (q, k), one row a q.
        token_seconds, latency: of the exchange: seconds of a received token (forward and backward), and of starting it.
    """

    pair_flops: float
    tile: int
    q_knots: tuple[float, ...]
    k_knots: tuple[float, ...]
    rates: tuple[tuple[float, ...], ...] = field(repr=False)
    token_seconds: float = 0.0
    latency: float = 0.0

    def hash(self) -> str:
        """8 hex digits; ranks that differ would choose different plans."""
        return f"{zlib.crc32(repr(astuple(self)).encode()):08x}"

    @cached_property
    def _grid(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.log(self.q_knots), np.log(self.k_knots), np.log(np.asarray(self.rates))

    def seconds(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Seconds of chunks with q queries of which the last sees k keys; arrays of one shape, 0 for q = 0."""
        q, k = np.asarray(q, dtype=np.float64), np.asarray(k, dtype=np.float64)
        padded = np.ceil(q / self.tile) * self.tile
        return self.pair_flops * padded * (k - (q - 1) / 2) / self._rate(q, k)

    def _rate(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        q_log, k_log, rates = self._grid
        i, u = _position(np.log(np.maximum(q, 1)), q_log)
        j, v = _position(np.log(np.maximum(k, 1)), k_log)
        i1, j1 = np.minimum(i + 1, len(q_log) - 1), np.minimum(j + 1, len(k_log) - 1)
        low = rates[i, j] * (1 - v) + rates[i, j1] * v
        high = rates[i1, j] * (1 - v) + rates[i1, j1] * v
        return np.exp(low * (1 - u) + high * u)


def _position(x: np.ndarray, knots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index of the knot below, share of the way to the next), clamped to the grid."""
    x = np.clip(x, knots[0], knots[-1])
    i = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, max(0, len(knots) - 2))
    width = knots[np.minimum(i + 1, len(knots) - 1)] - knots[i]
    return i, np.where(width > 0, (x - knots[i]) / np.where(width > 0, width, 1), 0.0)


def analytic_kernel_cost(device: Device, pair_flops: float, kv_bytes_per_token: float, ranks: int = 1) -> KernelCost:
    """Kernel cost from the rates of a device.

    On a GPU the rate follows the number of keys, and chunks of less than two tiles of queries reach less of it; on a
    CPU, where a chunk is worked off query block by query block, it follows the number of queries.

    Args:
        pair_flops: FLOPs of a (query, key) pair in a layer on one rank, forward and backward.
        kv_bytes_per_token: bytes of K and V of one token in a layer on one rank.
        ranks: TP x CP, within which keys and values travel.
    """
    knots = tuple(float(x) for x in device.knots)
    if device.tile > 1:
        edge = 2.0 * device.tile
        q_knots: tuple[float, ...] = (1.0, edge - 1, edge, knots[-1])
        rates = tuple(tuple(r * (SHORT_QUERIES if q < edge else 1.0) for r in device.rates) for q in q_knots)
    else:
        q_knots, rates = knots, tuple((r,) * len(knots) for r in device.rates)
    traffic = 2 * kv_bytes_per_token / device.reach(ranks)  # there in forward, gradients back in backward
    return KernelCost(pair_flops, device.tile, q_knots, knots, rates, traffic, 2 * device.latency)


def measured_kernel_cost(
    rows: Sequence[tuple[int, int, float]], pair_flops: float, token_seconds: float, latency: float
) -> KernelCost:
    """Kernel cost from measured (queries, keys, seconds forward and backward). A cell that was not measured takes the
    rate of the nearest measured number of queries for the same keys.

    Args:
        pair_flops, token_seconds, latency: see KernelCost.
    """
    q_knots, k_knots = (sorted({float(r[x]) for r in rows}) for x in (0, 1))
    seconds = {(float(q), float(k)): s for q, k, s in rows}
    grid = []
    for q in q_knots:
        line = []
        for k in k_knots:
            near = min((a for a, b in seconds if b == k), key=lambda a: abs(np.log(a / q)))
            line.append(pair_flops * near * (k - (near - 1) / 2) / seconds[near, k])
        grid.append(tuple(line))
    return KernelCost(pair_flops, 1, tuple(q_knots), tuple(k_knots), tuple(grid), token_seconds, latency)
