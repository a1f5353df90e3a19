"""The loader: the same steps and states with any number of threads, whatever was built ahead; errors end it."""

import gc
import itertools
import json
import resource
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from torchtitan_wlb.config import Packing, Training
from torchtitan_wlb.cost.cost_model import CostModel
from torchtitan_wlb.cost.devices import DEVICES
from torchtitan_wlb.cost.kernel_cost import analytic_kernel_cost
from torchtitan_wlb.cost.step_time import without_pipelining
from torchtitan_wlb.data.dataloader import StepPlans, build_dataloader
from torchtitan_wlb.data.documents import Documents
from torchtitan_wlb.data.source_spec import SourceSpec
from torchtitan_wlb.data.step_builder import Layout, StepBuilder
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.packing.objective import StepObjective
from torchtitan_wlb.packing.planner import StepPlanner
from torchtitan_wlb.packing.settings import resolve_settings

COST = CostModel(pair_flops=0.05, token_cost=1.0, knots=(1,), rates=(1.0,))


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    lengths = np.minimum(np.random.default_rng(0).lognormal(3, 1, 3000), 126).astype(int) + 2
    (folder / "lengths.json").write_text(json.dumps(lengths.tolist()))
    spec = SourceSpec("synthetic", str(folder / "lengths.json"), "text", "", 128, "split")
    return Documents([spec], [1.0], Tokenizer("bytes"), str(folder / "cache"))


def load(documents, state=None, workers=0, n=4, epochs=0, cp=2, token_seconds=0.0):
    settings = resolve_settings(
        Training(seq_len=128, epochs=epochs),
        Packing(delay_price=0.2),
        n=n,
        objective=StepObjective(n, 0.0),
        seed=0,
        cost=COST,
    )
    kernel_cost = replace(analytic_kernel_cost(DEVICES["cpu"], 1.0, 0.0), token_seconds=token_seconds)
    layout = Layout(1, 0, cp, 1, 1, 0, "adaptive", kernel_cost, without_pipelining(n))
    return build_dataloader(StepPlans(documents, settings, state), StepBuilder(documents, settings, layout), workers)


def same(a, b) -> bool:
    tensors = zip(a.micro_batches, b.micro_batches, strict=True)
    return (a.plan_hash, a.state, a.n_targets) == (b.plan_hash, b.state, b.n_targets) and all(
        torch.equal(x.tokens, y.tokens) and torch.equal(x.labels, y.labels) for x, y in tensors
    )


def test_threads_change_nothing_and_any_state_goes_on(documents):
    straight = list(itertools.islice(load(documents), 12))
    assert len({b.plan_hash for b in straight}) == 12
    for workers in (1, 3):
        assert all(same(a, b) for a, b in zip(itertools.islice(load(documents, workers=workers), 12), straight))
        # The state of an item is that after its step, though later steps have been planned ahead.
        state = json.loads(json.dumps(straight[4].state))
        assert all(same(a, b) for a, b in zip(itertools.islice(load(documents, state, workers), 7), straight[5:]))


def test_a_slow_exchange_makes_the_predicted_step_longer(documents):
    kernel = analytic_kernel_cost(DEVICES["cpu"], 1.0, 0.0)
    alone, slow = next(load(documents)), next(load(documents, token_seconds=float(kernel.seconds(64, 64))))
    assert slow.step_time.seconds > 1.02 * alone.step_time.seconds


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_finite_data_ends(documents, workers):
    steps = list(load(documents, workers=workers, epochs=1))
    assert sum(b.stats["docs"] for b in steps) == 3000 and steps[-1].stats["queue_docs"] == 0


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("where", ["planner", "builder"])
def test_an_error_ends_the_loop_with_its_cause(documents, workers, where, monkeypatch):
    owner, name = (StepPlanner, "__next__") if where == "planner" else (StepBuilder, "__call__")
    plain = getattr(owner, name)

    def fails_at_3(self, *args):
        if (args[0].step if args else self.step + 1) == 3:
            raise ZeroDivisionError("the third step")
        return plain(self, *args)

    monkeypatch.setattr(owner, name, fails_at_3)
    steps = load(documents, workers=workers)
    next(steps), next(steps)
    with pytest.raises(ZeroDivisionError, match="the third step"):
        next(steps)


def test_a_step_of_many_micro_batches_needs_few_descriptors(documents):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        batch = next(load(documents, workers=1, n=64))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(batch.micro_batches) == 64


def test_threads_end_with_their_loader(documents):
    gc.collect()
    before = threading.active_count()
    steps = load(documents, workers=3)
    next(steps)
    assert threading.active_count() > before + 3
    del steps
    gc.collect()
    assert threading.active_count() <= before
