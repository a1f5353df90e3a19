"""How the documents of a step become N micro-batches. Ints and floats, no torch; equal on all ranks.

A packer is given the spans that arrive in a step and returns N lists of spans; what it keeps back it shows in
`waiting()` and in its state. Nothing is lost: arrived = packed + waiting, at every step. After the data has ended
(`ended`), it drains.
"""

from collections.abc import Iterator
from typing import Protocol

from torchtitan_wlb.packing.cost_model import CostModel
from torchtitan_wlb.packing.outlier_queue import OutlierQueues, Span


class Packer(Protocol):
    def pack(self, arrivals: list[Span], ended: bool) -> list[list[Span]]:
        """The N micro-batches of a step."""
        ...

    def waiting(self) -> Iterator[Span]:
        """Spans kept for later steps."""
        ...

    def state(self) -> list[list[Span]]:
        """Everything that `restore` needs to go on exactly."""
        ...

    def restore(self, state: list[list[Span]]) -> None: ...


class Plain:
    """Concatenate documents in order of arrival and cut at the context window (WLB-LLM Plain-4D)."""

    def __init__(self, n: int, seq_len: int):
        self.n, self.seq_len = n, seq_len
        self.carry: list[Span] = []

    def pack(self, arrivals: list[Span], ended: bool) -> list[list[Span]]:
        stream = iter([*self.carry, *arrivals])
        rest: Span | None = next(stream, None)
        micro_batches: list[list[Span]] = []
        for _ in range(self.n):
            window: list[Span] = []
            room = self.seq_len
            while room and rest is not None:
                cut = min(rest.stop, rest.start + room)
                window.append(rest._replace(stop=cut))
                room -= cut - rest.start
                rest = rest._replace(start=cut) if cut < rest.stop else next(stream, None)
            micro_batches.append(window)
        self.carry = ([rest] if rest is not None else []) + list(stream)
        return micro_batches

    def waiting(self) -> Iterator[Span]:
        yield from self.carry

    def state(self) -> list[list[Span]]:
        return [list(self.carry)]

    def restore(self, state: list[list[Span]]) -> None:
        (self.carry,) = state


class WLBPaper:
    """Algorithm 1 of WLB-LLM (WLB-LLM §4.3): variable-length micro-batches, outlier queues, left-overs first.

    Args:
        n: micro-batches a step.
        s_max: tokens a micro-batch may hold, padding to `multiple` included.
        thresholds: see OutlierQueues.
    """

    def __init__(self, n: int, s_max: int, multiple: int, thresholds: tuple[int, ...], cost: CostModel):
        self.n, self.multiple, self.cost = n, multiple, cost
        self.capacity = s_max // multiple * multiple
        self.queues = OutlierQueues(thresholds, n)
        self.left_over: list[Span] = []

    def pack(self, arrivals: list[Span], ended: bool) -> list[list[Span]]:
        new = [span for span in arrivals if not self.queues.put(span)]
        new += self.queues.release(drain=ended)
        new.sort(key=lambda span: -span.length)
        micro_batches: list[list[Span]] = [[] for _ in range(self.n)]
        work, tokens = [0.0] * self.n, [0] * self.n
        left_over = []
        for span in [*self.left_over, *new]:
            lightest = min(range(self.n), key=work.__getitem__)
            shortest = min(range(self.n), key=tokens.__getitem__)
            for b in (lightest, shortest):
                if tokens[b] + span.length <= self.capacity:
                    micro_batches[b].append(span)
                    work[b] += self.cost.document(span.length)
                    tokens[b] += span.length
                    break
            else:
                left_over.append(span)
        self.left_over = left_over
        return micro_batches

    def waiting(self) -> Iterator[Span]:
        for queue in [*self.queues.queues, self.left_over]:
            yield from queue

    def state(self) -> list[list[Span]]:
        return [*(list(q) for q in self.queues.queues), list(self.left_over)]

    def restore(self, state: list[list[Span]]) -> None:
        *self.queues.queues, self.left_over = state


def deal(work: list[float], dp: int, step: int, sort: bool) -> list[list[int]]:
    """Which micro-batches each data-parallel rank trains, in order: dp lists of N / dp indices.

    With sort, longest first to the rank with least work that has room, so that ranks are even. Ties and the order
    inside a
    rank rotate with the step: no rank and no pipeline slot always gets the largest. Without sort (plain), in order.
    """
    m = len(work) // dp
    if not sort:
        return [list(range(r * m, (r + 1) * m)) for r in range(dp)]
    hands: list[list[int]] = [[] for _ in range(dp)]
    total = [0.0] * dp
    for b in sorted(range(len(work)), key=lambda b: -work[b]):
        rank = min((r for r in range(dp) if len(hands[r]) < m), key=lambda r: (total[r], (r + step) % dp))
        hands[rank].append(b)
        total[rank] += work[b]
    return [hand[step % m :] + hand[: step % m] for hand in hands]
