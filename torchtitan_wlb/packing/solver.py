"""The integer program of WLB-LLM's Eq. 1 with an open solver (HiGHS through SciPy), for the `fixed_solver` baseline and
for bounds.

minimise t   with   sum_i w_i x_ij <= t,   sum_i d_i x_ij <= S,   sum_j x_ij = 1,   x_ij in {0, 1}
"""

from dataclasses import dataclass

import numpy as np

from torchtitan_wlb.packing.greedy import spread


@dataclass(frozen=True)
class Solution:
    """where: [k] bin of every document; largest: the objective; bound: no assignment is better."""

    where: np.ndarray
    largest: float
    bound: float


def solve(
    weights: np.ndarray,
    tokens: np.ndarray,
    bins: int,
    capacity: int,
    start: np.ndarray,
    nodes: int,
    seconds: float = float("inf"),
) -> Solution:
    """Even out weights over bins.

    Args:
        weights, tokens: [k] of the documents.
        capacity: tokens a bin may hold.
        start: [k] a feasible assignment; what is returned is never worse.
        nodes: of the search tree, at most. The same on every rank and machine, as plans must be.
        seconds: time limit, for studies only: ranks that stop at different nodes would plan different steps.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import bmat, csr_matrix, eye, kron

    k = len(weights)
    known = float(np.bincount(start, weights, bins).max()) if k else 0.0
    trivial = max(float(weights.sum()) / bins, float(np.max(weights, initial=0.0)))
    if k == 0 or trivial >= known * (1 - 1e-12):
        return Solution(start, known, known)
    scale = 1.0 / known
    # Columns: x_00 .. x_0(bins-1), x_10, ..., t.
    per_bin = kron(csr_matrix(weights[None] * scale), eye(bins))
    fits = kron(csr_matrix(tokens[None].astype(float)), eye(bins))
    once = kron(eye(k), np.ones((1, bins)))
    a = bmat([[per_bin, -np.ones((bins, 1))], [fits, csr_matrix((bins, 1))], [once, csr_matrix((k, 1))]]).tocsr()
    low = np.concatenate([np.full(2 * bins, -np.inf), np.ones(k)])
    high = np.concatenate([np.zeros(bins), np.full(bins, float(capacity)), np.ones(k)])
    result = milp(
        np.append(np.zeros(k * bins), 1.0),
        constraints=LinearConstraint(a, low, high),
        integrality=np.append(np.ones(k * bins), 0),
        bounds=Bounds(np.append(np.zeros(k * bins), trivial * scale), np.append(np.ones(k * bins), 1.0)),
        options={"node_limit": nodes, "time_limit": seconds, "mip_rel_gap": 1e-4},
    )
    bound = max(trivial, (result.mip_dual_bound or 0.0) / scale)
    if result.x is None:
        return Solution(start, known, min(bound, known))
    where = result.x[:-1].reshape(k, bins).argmax(axis=1)
    largest = float(np.bincount(where, weights, bins).max())
    if largest > known or np.bincount(where, tokens, bins).max() > capacity:
        where, largest = start, known
    return Solution(where, largest, min(bound, largest))


def assign_exactly(weights: np.ndarray, tokens: np.ndarray, bins: int, capacity: int, nodes: int) -> np.ndarray:
    """`spread`, then the documents that fitted are assigned anew by the solver; see packers.Fixed for the arguments."""
    where = spread(weights, tokens, bins, capacity)
    fitted = where >= 0
    where[fitted] = solve(weights[fitted], tokens[fitted], bins, capacity, where[fitted], nodes).where
    return where
