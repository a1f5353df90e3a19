"""Learning rate, parameter groups, FLOPs, gradient clipping, step metrics: numbers worked out by hand."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchtitan_wlb.config import LRScheduler, Metrics, Optimizer
from torchtitan_wlb.metrics import MetricLogger, peak_flops, training_flops
from torchtitan_wlb.models.llama import ModelArgs
from torchtitan_wlb.optimizer import Optimizers, lr_factor
from torchtitan_wlb.parallelisms.distributed import check_agreement, clip_grad_norm, gather_step


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "decay, ratio, expected",
    [
        ("linear", 1.0, {1: 0.5, 2: 1.0, 3: 0.8875, 6: 0.55, 10: 0.1}),
        ("linear", 0.5, {2: 1.0, 6: 1.0, 7: 0.775, 10: 0.1}),
        ("cosine", 1.0, {2: 1.0, 6: 0.55, 10: 0.1}),
        ("sqrt", 1.0, {2: 1.0, 4: 0.55, 10: 0.1}),
    ],
)
def test_learning_rate(decay, ratio, expected):
    c = LRScheduler(warmup_steps=2, decay_type=decay, decay_ratio=ratio, min_lr_factor=0.1)
    assert {s: lr_factor(s, 10, c) for s in expected} == pytest.approx(expected)
    assert lr_factor(1, 10, LRScheduler(warmup_steps=0)) < 1


def test_only_matrices_decay():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.RMSNorm(2))
    optimizers = Optimizers([model], Optimizer(name="SGD", lr=1.0, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    matrix = model[0].weight.detach().clone()
    optimizers.step(lr=0.1)
    assert torch.allclose(model[0].weight, matrix * 0.95) and torch.equal(model[1].weight, torch.ones(2))
    optimizers.zero_grad()
    assert model[0].weight.grad is None


def test_flops_count_documents():
    args = ModelArgs(dim=8, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=16, vocab_size=128)
    per_token = 2 * (2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8) + 2 * 3 * 8 * 16) + 2 * 8 * 128
    assert training_flops(args, tokens=10, attended_pairs=7) == 3 * (10 * per_token + 7 * 2 * 4 * 8)
    assert peak_flops("NVIDIA H200") == 989e12 and peak_flops("cpu") is None


def test_clipping(one_rank):
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    p.grad, q.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_grad_norm([p, q], 0.0, torch.device("cpu")).item() == pytest.approx(5.0)
    assert p.grad.tolist() == [3.0, 0.0]
    assert clip_grad_norm([p, q], 10.0, torch.device("cpu")).item() == pytest.approx(5.0)
    assert p.grad.tolist() == [3.0, 0.0]
    assert clip_grad_norm([p, q], 2.5, torch.device("cpu")).item() == pytest.approx(5.0)
    assert p.grad.tolist() == pytest.approx([1.5, 0.0]) and q.grad.tolist() == pytest.approx([2.0])


def test_step_sums(one_rank):
    sums = gather_step(torch.tensor(2.5), "ffffffffffff", (3.0, 2.0), 4.0, {"a": 2}, counts=True, all_kinds=("a", "b"))
    assert (sums.loss, sums.cp_work_max, sums.cp_work_mean, sums.sharding) == (2.5, 3.0, 2.0, {"a": 2})
    check_agreement({"x": "1"})


def test_metrics_file_survives_a_crash(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    log = MetricLogger(
        Metrics(),
        {},
        None,
        dump_folder=tmp_path,
        rank=0,
        world_size=1,
        resumed_step=2,
        peak=None,  # type: ignore[arg-type]
    )
    log.log()
    log.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
