"""Learning rate, parameter groups, FLOPs, gradient clipping, step metrics: numbers worked out by hand."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchtitan_wlb.config import LRScheduler, Metrics, Optimizer
from torchtitan_wlb.cost.devices import find_device, peak_flops
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.metrics import MetricLogger
from torchtitan_wlb.models.model_args import ModelArgs
from torchtitan_wlb.optimizer import build_optimizers, lr_factor
from torchtitan_wlb.parallelisms import step_sums
from torchtitan_wlb.parallelisms.distributed import check_agreement
from torchtitan_wlb.parallelisms.gradients import clip_grad_norm
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims
from torchtitan_wlb.parallelisms.step_sums import gather_step, measured_imbalance, read_steps
from torchtitan_wlb.profiling import MicroBatchClock


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
    # A shorter or longer run keeps its rates if the schedule has steps of its own.
    own = c.model_copy(update={"steps": 10})
    assert [lr_factor(s, n, own) for s, n in ((6, 7), (6, 100), (11, 100))] == pytest.approx(
        [lr_factor(6, 10, c), lr_factor(6, 10, c), 0.1]
    )


def test_only_matrices_decay():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.RMSNorm(2))
    optimizers = build_optimizers([model], Optimizer(name="SGD", lr=1.0, weight_decay=0.5))
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
    assert args.training_flops(tokens=10, attended_pairs=7) == 3 * (10 * per_token + 7 * 2 * 4 * 8)
    assert peak_flops("NVIDIA H200") == 989e12 and peak_flops("cpu") is None
    assert peak_flops("NVIDIA H100 PCIe") == 756e12 and peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA GB200") == 2500e12 and peak_flops("NVIDIA B200") == 2250e12


def test_unknown_devices_are_named():
    assert find_device("auto", "NVIDIA H200") == "h200" and find_device("auto", "cpu") == "cpu"
    assert find_device("h100", "Other 1") == "h100" and find_device("auto", "Other 1", "profile.json") == "h100"
    with pytest.raises(ConfigError, match=r"cost_model\.device auto: nothing is known .*Other 1; name a device"):
        find_device("auto", "Other 1")


def test_clipping(one_rank):
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    p.grad, q.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_grad_norm({"p": p, "q": q}, 0.0, torch.device("cpu")).item() == pytest.approx(5.0)
    assert p.grad.tolist() == [3.0, 0.0]
    assert clip_grad_norm({"p": p, "q": q}, 10.0, torch.device("cpu")).item() == pytest.approx(5.0)
    assert p.grad.tolist() == [3.0, 0.0]
    assert clip_grad_norm({"p": p, "q": q}, 2.5, torch.device("cpu")).item() == pytest.approx(5.0)
    assert p.grad.tolist() == pytest.approx([1.5, 0.0]) and q.grad.tolist() == pytest.approx([2.0])


def test_a_parameter_without_a_gradient_ends_the_run_by_name(one_rank):
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    p.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"no gradient after backward: layers\.q$"):
        clip_grad_norm({"layers.p": p, "layers.q": q}, 1.0, torch.device("cpu"))
    q.requires_grad_(False)
    assert clip_grad_norm({"layers.p": p, "layers.q": q}, 1.0, torch.device("cpu")).item() == pytest.approx(2**0.5)


def test_step_sums(one_rank):
    kinds = ("a", "b")
    table = gather_step(torch.tensor(2.5), "ffffffffffff", (3.0, 2.0), 4.0, {"a": 2}, counts=True, all_kinds=kinds)
    sums = read_steps([table], kinds)
    assert (sums.loss, sums.cp_work_max, sums.cp_work_mean, sums.sharding) == (2.5, 3.0, 2.0, {"a": 2})
    assert sums.step_seconds_max == sums.step_seconds_mean == 4.0
    check_agreement({"x": "1"})


def test_ranks_with_another_plan_are_named_whichever_step_it_was():
    same = torch.tensor([[1.0, 7, 1, 3, 2, 4], [1.0, 7, 1, 3, 2, 8]], dtype=torch.float64)
    other = same.clone()
    other[1, 1] = 6
    sums = read_steps([same, same], ())
    assert (sums.step_seconds_max, sums.step_seconds_mean) == (8, 6)
    with pytest.raises(RuntimeError, match=r"rank\(s\) \[1\]"):
        read_steps([other, same], ())


def test_measured_imbalance_adds_stages_and_takes_the_slowest_of_those_who_share(one_rank, monkeypatch):
    dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=2, tp=1, pp=2)
    # [pp, dp, cp, M]: micro-batches of the two data-parallel ranks take (2 + 1, 1 + 1) and (1 + 1, 1 + 5) seconds
    table = torch.tensor([[[[2.0, 1], [1, 1]], [[1, 1], [1, 0.5]]], [[[1, 1], [1, 0]], [[1, 5], [1, 1]]]])
    monkeypatch.setattr(step_sums, "all_gather", lambda out, _: out.copy_(table.flatten()))
    measured = measured_imbalance([0.0, 0.0], dims, torch.device("cpu"))
    assert measured == pytest.approx(6 / ((3 + 2 + 2 + 6) / 4))


def test_micro_batch_clock():
    clock = MicroBatchClock(torch.device("cpu"), timed=True)
    for _ in range(2):  # the second step forgets the first
        clock.begin_step(["a", "b"])
        with clock.part("forward", 0):
            time.sleep(0.05)  # waiting does not count
        with clock.part("forward", 1):
            sum(range(300_000))
        with clock.part("backward", 1):
            sum(range(300_000))
    first, second = clock.seconds()
    assert first < 0.005 < second


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
