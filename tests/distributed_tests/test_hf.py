"""Models of Hugging Face: their weights in every layout give transformers' own hidden states, losses and gradients."""

import pytest
import torch

from tests.distributed_tests.layouts import Case, make_documents, run_cases
from tests.distributed_tests.ranks import run_ranks
from tests.hf_models import FAMILIES, make_model
from torchtitan_wlb.config import Model
from torchtitan_wlb.models.hf import hf_name, resolve_model

pytest.importorskip("transformers")

LAYOUTS = {
    "dp2": {"dp_shard": 2},
    "tp2": {"tp": 2, "ac": "op"},
    "cp2": {"cp": 2, "sharding": "hybrid"},
    "pp2": {"pp": 2, "m": 4},
    "pp2-zbv": {"pp": 2, "m": 4, "schedule": "ZBVZeroBubble"},
    "tp4": {"tp": 4},
    "pp2tp2": {"pp": 2, "tp": 2, "m": 4, "schedule": "Interleaved1F1B"},
    "dp2cp2": {"dp_shard": 2, "cp": 2},
}
RANKS = {name: 4 if name in ("tp4", "pp2tp2", "dp2cp2") else 2 for name in LAYOUTS}
PAIRS = [(f, name) for f in FAMILIES for name in LAYOUTS if RANKS[name] == 2 or f.startswith("qwen")]


def as_transformers_does(model, documents) -> tuple[float, dict, list]:
    """(loss, {name: gradient}, hidden states) of every document alone, in fp64."""
    model = model.double()
    n_valid = sum(int((y != -100).sum()) for _, y in documents)
    total, hidden = torch.zeros((), dtype=torch.float64), []
    for tokens, labels in documents:
        h = model.model(torch.from_numpy(tokens)[None]).last_hidden_state[0]
        logits = model.lm_head(h)
        total = total + torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="sum") / n_valid
        hidden.append(h.detach())
    total.backward()
    return total.item(), {n: p.grad for n, p in model.named_parameters()}, hidden


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{family: (folder, loss, gradients, hidden states)}; norms and biases are no longer ones and zeros."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        model = make_model(family, folder)
        found[family] = (folder, *as_transformers_does(model, make_documents()))
    return found


@pytest.fixture(scope="module")
def results(folders, tmp_path_factory):
    out, done = tmp_path_factory.mktemp("layouts"), set()

    def get(family: str, layout: str) -> list[dict]:
        world_size = RANKS[layout]
        if world_size not in done:
            done.add(world_size)
            cases = [
                Case(
                    f"{f}-{name}",
                    **LAYOUTS[name],
                    args=resolve_model(Model(flavor=str(folders[f][0])), 259),
                    weights=str(folders[f][0]),
                )
                for f, name in PAIRS
                if RANKS[name] == world_size
            ]
            run_ranks(world_size, run_cases, cases, None, out)
        return [torch.load(out / f"{family}-{layout}-{r}.pt", weights_only=False) for r in range(world_size)]

    return get


@pytest.mark.parametrize("family, layout", PAIRS)
def test_loss_gradients_and_hidden_states_are_those_of_transformers(folders, results, family, layout):
    _, loss, exact, hidden = folders[family]
    is_tied = "lm_head.weight" not in exact
    ranks = results(family, layout)
    seen = set()
    for rank in ranks:
        assert rank["loss"] == pytest.approx(loss, rel=1e-5)
        for name, gradient in rank["gradients"].items():
            theirs = exact[hf_name(name, is_tied)]
            seen.add(hf_name(name, is_tied))
            assert not gradient[len(theirs) :].any(), f"{name}: padding has a gradient"
            error = (gradient[: len(theirs)].double() - theirs).norm() / theirs.norm()
            assert error < 1e-4, f"{name}: {error:.2e}"
        for owners, h in zip(rank["owners"], rank["hidden"][0] if rank["hidden"] else []):
            for (doc, position), x in zip(owners.tolist(), h):
                if doc >= 0:
                    torch.testing.assert_close(x.double(), hidden[doc][position], atol=1e-4, rtol=1e-4)
    assert seen == exact.keys()
    norm = sum(g.square().sum() for g in exact.values()).sqrt().item()
    assert ranks[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
