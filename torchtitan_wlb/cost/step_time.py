"""Predicted time of a step, from the schedule's own actions and the time that each takes. No torch.

    actions of every rank ──► StepModel ◄── seconds of every micro-batch, spread over stages by StageCosts
                                  │
         step time, bubble, critical path; the best order of the micro-batches

A rank works off its list of actions (kind, stage, micro-batch) in order. One starts when the rank is free and its input
is there: F needs F of the stage before, B and I need B or I of the stage after, plus a transfer if that is on another
rank. F: forward. B: backward. I and W: its halves, gradients of the input and of the weights. The runtime in
parallelisms/varlen_stage.py executes the same lists.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from torchtitan_wlb.cost.cost_model import BACKWARD_ATTENTION, BACKWARD_MATMUL

Action = tuple[str, int, int]
KINDS = "FBIW"
# choose_order: up to so many micro-batches all orders are tried, beyond that swaps of two, a number of rounds.
TRY_ALL, MOST_SWAPS, ROUNDS = 5, 400, 20
TICKS = 1_000_000  # a step's work in whole numbers, so that every rank chooses the same order


def stages_of(actions: list[Action]) -> list[int]:
    """The stages that a rank with these actions holds."""
    return sorted({stage for _, stage, _ in actions})


@dataclass(frozen=True)
class StageCosts:
    """How the work of a micro-batch is spread over stages.

    Attributes:
        attention, linear: share of the attention and of everything else in every stage, [S] each.
        recomputed: share of the forward without attention that activation checkpointing repeats in backward.
        transfer: (seconds a transfer between stages takes at least, seconds a token of the micro-batch adds).
    """

    attention: tuple[float, ...]
    linear: tuple[float, ...]
    recomputed: float = 0.0
    transfer: tuple[float, float] = (0.0, 0.0)

    def seconds(self, attention: np.ndarray, linear: np.ndarray) -> np.ndarray:
        """Seconds [kinds, S, M] of the actions of micro-batches with [M] seconds of attention and of everything
        else."""
        a, l = np.outer(self.attention, attention), np.outer(self.linear, linear)
        forward = a / (1 + BACKWARD_ATTENTION) + l / (1 + BACKWARD_MATMUL)
        backward = a + l - forward + self.recomputed * l / (1 + BACKWARD_MATMUL)
        weights = l / (1 + BACKWARD_MATMUL)
        inputs = backward - weights
        # The first stage sends no gradient on: all its backward is left to W.
        weights[0] += inputs[0]
        inputs[0] = 0.0
        return np.stack([forward, backward, inputs, weights])


@dataclass(frozen=True)
class StepTime:
    """A predicted step of one pipeline.

    Attributes:
        seconds: from the first action to the end of the last.
        busy: [PP] seconds that each rank computes.
        critical_path: (rank, action) from first to last, each waiting for the one before.
    """

    seconds: float
    busy: np.ndarray
    critical_path: list[tuple[int, Action]]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        return 1 - float(self.busy.mean()) / self.seconds if self.seconds else 0.0


class StepModel:
    """The time model of a schedule.

    Args:
        actions: of every rank, see the module docstring.
        costs: of the stages.

    Raises:
        ValueError: the actions wait for each other in a circle.
    """

    def __init__(self, actions: list[list[Action]], costs: StageCosts):
        self.costs = costs
        self.n_ranks = len(actions)
        self.n_micro_batches = 1 + max(i for each in actions for _, _, i in each)
        # In an order in which each has its inputs: (rank, action, index of the one before on the rank, index of the
        # one whose result it needs, whether that comes from another rank); -1 for none.
        self._rows: list[tuple[int, Action, int, int, bool]] = []
        done: dict[tuple[str, int, int], tuple[int, int]] = {}  # ("F" or "B", stage, micro-batch) -> (row, rank)
        last_stage = max(s for each in actions for _, s, _ in each)
        todo, before = [list(reversed(each)) for each in actions], [-1] * self.n_ranks
        while any(todo):
            progress = False
            for rank, each in enumerate(todo):
                while each:
                    kind, stage, i = each[-1]
                    source = None
                    if kind == "F" and stage > 0:
                        source = ("F", stage - 1, i)
                    elif kind in "BI" and stage < last_stage:
                        source = ("B", stage + 1, i)
                    if source is not None and source not in done:
                        break
                    row, origin = done[source] if source else (-1, rank)
                    self._rows.append((rank, each.pop(), before[rank], row, origin != rank))
                    before[rank] = len(self._rows) - 1
                    if kind != "W":
                        done["F" if kind == "F" else "B", stage, i] = before[rank], rank
                    progress = True
            if not progress:
                raise ValueError(f"These actions wait for each other: {[each[-1] for each in todo if each]}")

    def _finish(self, seconds: np.ndarray, transfer: np.ndarray, orders: np.ndarray) -> np.ndarray:
        """When every row ends, [rows, P], for P orders [P, M] of micro-batches."""
        ends = np.zeros((len(self._rows), len(orders)), seconds.dtype)
        for n, (_, (kind, stage, i), before, source, remote) in enumerate(self._rows):
            begin = ends[before] if before >= 0 else 0
            if source >= 0:
                begin = np.maximum(begin, ends[source] + transfer[orders[:, i]] if remote else ends[source])
            ends[n] = begin + seconds[KINDS.index(kind), stage, orders[:, i]]
        return ends

    def predict(self, attention: np.ndarray, linear: np.ndarray, tokens: np.ndarray | None = None) -> StepTime:
        """Time of a step.

        Args:
            attention, linear: [M] seconds of each micro-batch in training order, all stages, forward and backward.
            tokens: [M] lengths, for the transfers.
        """
        seconds, transfer = self.costs.seconds(attention, linear), self._transfer(tokens)
        ends = self._finish(seconds, transfer, np.arange(self.n_micro_batches)[None])[:, 0]
        busy = np.zeros(self.n_ranks)
        for rank, (kind, stage, i), *_ in self._rows:
            busy[rank] += seconds[KINDS.index(kind), stage, i]
        path, row = [], int(ends.argmax())
        while row >= 0:
            rank, action, before, source, remote = self._rows[row]
            path.append((rank, action))
            if source >= 0 and before >= 0:
                arrives = ends[source] + (transfer[action[2]] if remote else 0.0)
                row = source if arrives > ends[before] else before
            else:
                row = max(before, source)
        return StepTime(float(ends.max()), busy, path[::-1])

    def timeline(
        self, attention: np.ndarray, linear: np.ndarray, tokens: np.ndarray | None = None
    ) -> list[tuple[int, Action, float, float]]:
        """(rank, action, begin, end) of everything that a step computes; arguments as for `predict`."""
        seconds = self.costs.seconds(attention, linear)
        ends = self._finish(seconds, self._transfer(tokens), np.arange(self.n_micro_batches)[None])[:, 0]
        took = [float(seconds[KINDS.index(kind), stage, i]) for _, (kind, stage, i), *_ in self._rows]
        return [(row[0], row[1], float(end) - t, float(end)) for row, end, t in zip(self._rows, ends, took)]

    def choose_order(self, attention: np.ndarray, linear: np.ndarray, tokens: np.ndarray | None = None) -> list[int]:
        """Micro-batches in the order with the shortest predicted step (the given one, if none is shorter).

        All orders of few micro-batches, beyond that the best swap of two, again and again, from the given order or from
        the one with the longest in the middle. Decided on whole numbers, so that ranks with other rounding of floats
        agree.
        """
        m = self.n_micro_batches
        order = np.arange(m)
        if self.n_ranks == 1:
            return order.tolist()
        scale = TICKS / max(float((attention + linear).sum()), 1e-30)
        seconds = np.round(self.costs.seconds(attention, linear) * scale).astype(np.int64)
        transfer = np.round(self._transfer(tokens) * scale).astype(np.int64)
        if m <= TRY_ALL:
            orders = np.array(list(itertools.permutations(range(m))))
            return orders[self._finish(seconds, transfer, orders).max(0).argmin()].tolist()
        pairs = np.array(list(itertools.combinations(range(m), 2)))
        pairs = pairs[:: -(-len(pairs) // MOST_SWAPS)]
        falling = np.argsort(-seconds.sum(axis=(0, 1)), kind="stable")
        starts = np.stack([order, np.concatenate([falling[1::2][::-1], falling[::2]])])
        times = self._finish(seconds, transfer, starts).max(0)
        best, order = times.min(), starts[times.argmin()]
        for _ in range(max(3, min(ROUNDS, 20_000 // len(self._rows)))):
            orders = np.tile(order, (len(pairs), 1))
            rows = np.arange(len(pairs))
            orders[rows, pairs[:, 0]], orders[rows, pairs[:, 1]] = order[pairs[:, 1]], order[pairs[:, 0]]
            times = self._finish(seconds, transfer, orders).max(0)
            if times.min() >= best:
                break
            best, order = times.min(), orders[times.argmin()]
        return order.tolist()

    def _transfer(self, tokens: np.ndarray | None) -> np.ndarray:
        least, per_token = self.costs.transfer
        return least + per_token * (np.zeros(self.n_micro_batches) if tokens is None else tokens)


def without_pipelining(m: int, recomputed: float = 0.0) -> StepModel:
    """One rank with the whole model: m micro-batches one after the other."""
    return StepModel([[(kind, 0, i) for i in range(m) for kind in "FB"]], StageCosts((1.0,), (1.0,), recomputed))
