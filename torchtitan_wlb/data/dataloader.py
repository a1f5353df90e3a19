"""The loader, on torchdata.nodes: one node plans, threads build this rank's tensors ahead, in order.

    StepPlans (planner) ──► ParallelMapper (StepBuilder in threads) ──► PinMemory on CUDA ──► Loader

Every step is planned once a rank. Planning and building take some 20 ms of CPU a step at 128K, so threads do. An
exception in a node is raised in the training loop. Every item carries the planner's state after its step and the
training loop saves that of the last step it trained, so a resume may change the number of threads or the layout.
"""

from collections.abc import Iterator
from typing import Any

from torchdata.nodes import BaseNode, Loader, ParallelMapper, PinMemory

from torchtitan_wlb.data.documents import Documents
from torchtitan_wlb.data.step_builder import StepBatch, StepBuilder
from torchtitan_wlb.packing.document_order import DocumentOrder
from torchtitan_wlb.packing.planner import StepPlan, StepPlanner
from torchtitan_wlb.packing.settings import PackingSettings


def make_planner(documents: Documents, settings: PackingSettings) -> StepPlanner:
    order = DocumentOrder(documents.sizes, documents.weights, documents.lengths, settings.seed, settings.epochs)
    return StepPlanner(settings, order)


class StepPlans(BaseNode[StepPlan]):
    """Source node: the plans of a planner that starts from a state (None: from the first step)."""

    def __init__(self, documents: Documents, settings: PackingSettings, state: dict[str, Any] | None = None):
        super().__init__()
        self._documents, self._settings, self._start = documents, settings, state

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._planner = make_planner(self._documents, self._settings)
        self._state = initial_state or self._start or {}
        if self._state:
            self._planner.restore(self._state)

    def next(self) -> StepPlan:
        plan = next(self._planner)
        self._state = plan.state
        return plan

    def get_state(self) -> dict[str, Any]:
        return self._state


def build_dataloader(
    plans: StepPlans, builder: StepBuilder, num_workers: int = 0, pin_memory: bool = False
) -> Iterator[StepBatch]:
    """Steps of this rank, built by num_workers threads ahead of the training loop (0: by the loop itself)."""
    node: BaseNode = ParallelMapper(plans, builder, num_workers=num_workers, method="thread")
    if pin_memory:
        node = PinMemory(node)
    return iter(Loader(node, restart_on_stop_iteration=False))
