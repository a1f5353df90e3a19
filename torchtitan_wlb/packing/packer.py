"""What a packer is: it takes what it needs from a step's arrivals and returns N micro-batches. No torch; equal on all
ranks.

Nothing is lost: arrived = packed + waiting, at every step. After the data has ended a packer drains.
"""

import numpy as np

from torchtitan_wlb.packing.document_order import Order
from torchtitan_wlb.packing.spans import NONE, as_spans

Packed = tuple[np.ndarray, np.ndarray]  # (spans [k, 4], bounds [N + 1])


class Arrivals:
    """The documents that a step may draw.

    Args:
        order: of all documents.
        step: drawing now.
        due_tokens: tokens that are due in this step.
    """

    def __init__(self, order: Order, step: int, due_tokens: int):
        self._order, self.step, self._due_tokens = order, step, due_tokens
        self.count = 0

    def due(self) -> np.ndarray:
        """Draw the documents that are due, [k, 4]."""
        return self.take(self._due_tokens)

    def take(self, tokens: int) -> np.ndarray:
        """Draw whole documents until they reach some tokens, [k, 4]."""
        return self.draw(self.peek(tokens))

    def peek(self, tokens: int) -> np.ndarray:
        """What `take` would draw."""
        ids, n = self._order.peek(tokens)
        return np.column_stack([ids, np.zeros_like(ids), n, np.full_like(ids, self.step)])

    def draw(self, spans: np.ndarray) -> np.ndarray:
        """Draw the first documents that `peek` has shown."""
        self._order.advance(spans[:, 0])
        self.count += len(spans)
        return spans

    @property
    def ended(self) -> bool:
        """Whether no document is left to draw."""
        return self._order.exhausted


class Packer:
    """Base of all packers.

    Attributes:
        kept: spans kept for later steps, in as many arrays as the packer likes, [k, 4] each. Its whole state.
    """

    kept: list[np.ndarray]

    def pack(self, arrivals: Arrivals) -> Packed:
        """The N micro-batches of a step."""
        raise NotImplementedError

    def waiting(self) -> np.ndarray:
        """All spans kept, [k, 4]."""
        return np.concatenate([NONE, *self.kept])

    def state(self) -> list:
        """JSON from which `restore` goes on exactly."""
        return [spans.tolist() for spans in self.kept]

    def restore(self, state: list) -> None:
        """Raises ValueError for what `state` cannot have returned."""
        if not self._may_keep(len(state)):
            raise ValueError(f"{len(state)} lists of documents, not {len(self.kept)}")
        self.kept = [as_spans(rows) for rows in state]

    def _may_keep(self, arrays: int) -> bool:
        return arrays == len(self.kept)
