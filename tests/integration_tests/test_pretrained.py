"""As a new user: from a Hugging Face folder and jsonl through several layouts, and back to Hugging Face."""

import json
import os
from itertools import islice

import pytest
import torch
import torch.nn.functional as F

from scripts.convert import main as convert
from scripts.recipe import resolve_recipe
from tests.hf_models import make_model
from tests.hf_tokenizer import CODE, make_folder
from tests.integration_tests.test_train import layout, lines, train
from torchtitan_wlb.config import Model
from torchtitan_wlb.config_manager import load_config
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.initial_weights import InitialWeights
from torchtitan_wlb.models.hf import resolve_model

transformers = pytest.importorskip("transformers")
STEPS, LR = 50, 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """models/ with a tiny Qwen3 (tied embeddings, norms of q and k, YaRN) and data/ with jsonl."""
    folder = tmp_path_factory.mktemp("user")
    make_model("qwen3", folder / "model", vocab_size=1501)
    make_folder(folder / "model")
    (folder / "data").mkdir()
    documents = [code[start : start + 40 + start % 500] for code in CODE for start in range(0, 6000, 611)]
    half = len(documents) // 2
    for name, part in (("a.jsonl", documents[:half]), ("b.jsonl", documents[half:])):
        (folder / "data" / name).write_text("".join(json.dumps({"text": d, "x": 1}) + "\n" for d in part))
    return folder


@pytest.fixture(scope="module")
def flags(folder):
    model = str(folder / "model")
    return [
        *("--model.flavor", model, "--model.tokenizer", model, "--checkpoint.initial_load_path", model),
        *("--checkpoint.enable", "--checkpoint.interval", "1000", "--metrics.log_freq", "1"),
        *("--training.dataset", "json", "--training.dataset_path", str(folder / "data/*.jsonl")),
        *("--training.dataset_cache", str(folder / "cache"), "--training.seq_len", "256"),
        *("--training.mixed_precision_param", "float32", "--training.global_batch_size", "4"),
        *("--packing.delay_price", "0.1", "--optimizer.lr", str(LR), "--lr_scheduler.steps", str(STEPS)),
        *("--lr_scheduler.warmup_steps", "0", "--lr_scheduler.min_lr_factor", "1"),
    ]


@pytest.fixture(scope="module")
def steps(flags):
    """[(tokens, labels) of every document] of every step, as planned."""
    config = load_config([*flags, *layout(dp=2), "--metrics.enable_color=false"])
    recipe = resolve_recipe(config, ranks=2)
    documents = recipe.own_documents()
    plans = list(islice(recipe.own_planner()(recipe.settings), STEPS))
    parts = [[(int(s[0]), int(s[1]), int(s[2])) for s in plan.spans] for plan in plans]
    return [
        [(torch.from_numpy(documents.tokens(*p)).long(), torch.from_numpy(documents.labels(*p, -100))) for p in step]
        for step in parts
    ]


def loss_of(model, documents) -> torch.Tensor:
    total = sum(F.cross_entropy(model(t[None]).logits[0], y, ignore_index=-100, reduction="sum") for t, y in documents)
    return total / sum(int((y != -100).sum()) for _, y in documents)


@pytest.fixture(scope="module")
def theirs(folder, steps):
    """(losses, model) of transformers trained on the same documents with AdamW, one document at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], LR, (0.9, 0.95), 1e-8
    )
    losses = []
    for documents in steps:
        loss = loss_of(model, documents)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.fixture(scope="module")
def ours(folder, flags):
    """A run of 50 steps in four layouts, one after the other: the tied matrix is one, two copies, one, two."""
    out = folder / "run"
    layouts = [(layout(dp=2), 12), (layout(pp=2), 25), (layout(tp=2), 38)]
    zbv = [*layout(pp=2), "--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"]
    for degrees, until in [*layouts, (zbv, STEPS)]:
        said = train([*flags, *degrees, "--training.steps", str(until), "--job.dump_folder", str(out)])
        assert ("Weights from" in said) == (until == 12) and "has seen documents" not in said
    return out


def test_losses_are_those_of_transformers(ours, theirs):
    losses = [r["loss"] for r in lines(ours)]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.5
    assert losses == pytest.approx(theirs[0], abs=1e-3)


def test_the_trained_model_goes_back(ours, theirs, folder, steps, tmp_path):
    convert([str(ours / f"checkpoint/step-{STEPS}"), "--out", str(tmp_path / "back"), "--dtype", "float32"])
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    before = transformers.AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    for name, x in theirs[1].state_dict().items():
        moved = (x - before[name]).norm()
        assert (back.state_dict()[name] - x).norm() < 0.02 * moved, name
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    prompt = torch.tensor([reader.encode("import os\n")])
    assert back.generate(prompt, max_new_tokens=5, do_sample=False).shape[1] > prompt.shape[1]
    with torch.no_grad():
        assert loss_of(back, steps[0]).item() == pytest.approx(loss_of(theirs[1], steps[0]).item(), abs=1e-3)


def test_a_run_starts_from_a_checkpoint_of_another(ours, theirs, flags, steps, tmp_path):
    start = ["--checkpoint.initial_load_path", str(ours / f"checkpoint/step-{STEPS}"), "--training.steps", "1"]
    train([*flags, *layout(pp=2), *start, "--job.dump_folder", str(tmp_path)])
    with torch.no_grad():
        assert lines(tmp_path)[0]["loss"] == pytest.approx(loss_of(theirs[1], steps[0]).item(), abs=1e-3)


def test_other_weights_end_before_data_is_read(flags, folder, tmp_path):
    other = ["--model.flavor", "qwen3_0.6B", "--training.dataset_cache", str(tmp_path / "cache")]
    said = train([*flags, *layout(dp=1), *other, "--job.dump_folder", str(tmp_path)], processes=1, expect=1)
    assert "weights are not those of --model.flavor: model.layers.10.input_layernorm.weight is missing" in said
    assert not os.path.exists(tmp_path / "cache")


def test_folders_without_weights(folder, tmp_path):
    args = resolve_model(Model(flavor=str(folder / "model")), 1501)
    with pytest.raises(ConfigError, match=r"neither a folder with \*.safetensors nor a checkpoint folder step-N"):
        InitialWeights(str(tmp_path), args)
    for path in (folder / "model").glob("*.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"--checkpoint.initial_load_path .* cannot be read"):
        InitialWeights(str(tmp_path), args)
