"""Generating and converting: what transformers says, and what it loads."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.distributed.checkpoint as dcp

from scripts.convert import convert, split_into_files
from scripts.convert import main as convert_main
from scripts.generate import about, load_model
from scripts.generate import main as generate_main
from tests.hf_models import FAMILIES, make_model
from tests.hf_tokenizer import make_folder
from tests.unit_tests.test_run_state import config, made
from torchtitan_wlb.config import Model
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.generation import generate
from torchtitan_wlb.models.hf import read_hf_config, resolve_model, write_hf_config
from torchtitan_wlb.models.model_args import llama_configs
from torchtitan_wlb.parallelisms.tied_embeddings import COPY

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9], [250], [100, 3, 100]]


def ours(folder, args):
    return load_model(folder, args, 64, torch.float32, CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_prompts_says_what_transformers_says(family, tmp_path):
    theirs = make_model(family, tmp_path)
    theirs.generation_config.eos_token_id = None
    args = resolve_model(Model(flavor=str(tmp_path)), 259)
    model = ours(tmp_path, args)
    expected = [
        theirs.generate(torch.tensor([p]), max_new_tokens=24, do_sample=False, pad_token_id=0)[0, len(p) :].tolist()
        for p in PROMPTS
    ]
    said = generate(model, PROMPTS, max_new_tokens=24)
    assert said == expected
    stop = expected[0][3]
    assert generate(model, PROMPTS, max_new_tokens=24, stop=[stop])[0] == expected[0][: expected[0].index(stop)]
    assert generate(model, PROMPTS, max_new_tokens=24) == said  # the model is as it was


def test_sampling_draws_from_the_likely_ones(tmp_path):
    make_model("llama", tmp_path)
    model = ours(tmp_path, resolve_model(Model(flavor=str(tmp_path)), 259))
    greedy = generate(model, PROMPTS, max_new_tokens=5)
    assert generate(model, PROMPTS, max_new_tokens=5, temperature=1.0, top_p=1e-6) == greedy
    one = generate(model, PROMPTS, max_new_tokens=5, temperature=2.0, seed=1)
    assert one == generate(model, PROMPTS, max_new_tokens=5, temperature=2.0, seed=1)
    assert one != generate(model, PROMPTS, max_new_tokens=5, temperature=2.0, seed=2)


def save(folder, args, section, weights):
    """A checkpoint as train.py writes it, without an optimizer."""
    step = folder / "step-5"
    step.mkdir(parents=True)
    state = made(config()).model_copy(update={"args": args, "model": section})
    (step / "run_state.json").write_text(state.model_dump_json())
    tensors = {k: v for k, v in weights.items() if not (args.is_tied and k == COPY)}
    dcp.save({"model": tensors}, checkpoint_id=str(step), no_dist=True)
    return step


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_is_bit_equal(family, dtype, tmp_path):
    theirs = make_model(family, tmp_path / "theirs", getattr(torch, dtype))
    make_folder(tmp_path / "theirs")
    section = Model(flavor=str(tmp_path / "theirs"), tokenizer=str(tmp_path / "theirs"))
    args = resolve_model(section, 259)
    model = ours(tmp_path / "theirs", args)
    step = save(tmp_path, args, section, dict(model.named_parameters()))
    assert about(step, "", "")[2] == args
    convert_main([str(step), "--out", str(tmp_path / "back"), "--dtype", dtype, "--file_gb", "1e-4"])
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=getattr(torch, dtype))
    assert type(back) is type(theirs)
    expected, found = theirs.state_dict(), back.state_dict()
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype and torch.equal(found[name], x), name
    x = torch.tensor([list(range(3, 200))])
    if dtype == "float32":  # their own model has cast its rotary frequencies, too
        assert torch.equal(back(x).logits, theirs(x).logits)
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert reader.decode(reader.encode("import os")) == "import os"
    again = resolve_model(Model(flavor=str(tmp_path / "back")), 259)
    assert asdict(again) == asdict(args)


def test_a_model_of_our_table_becomes_a_llama(tmp_path):
    section = Model(flavor="debugmodel")
    args = resolve_model(section, 258)
    model = ours_without_weights(args)
    step = save(tmp_path, args, section, dict(model.named_parameters()))
    convert(step, tmp_path / "out", torch.float32, 1 << 40)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.lm_head.weight.shape == (258, 128) and type(back).__name__ == "LlamaForCausalLM"
    assert torch.equal(back.lm_head.weight, model.output.weight[:258])
    with pytest.raises(ConfigError, match=r"--out .* is not empty"):
        convert(step, tmp_path / "out", torch.float32, 1)
    generate_main([str(step), "--prompt", "def ", "--prompt", "x", "--max_new_tokens", "3"])


def ours_without_weights(args):
    from torchtitan_wlb.models.llama import Transformer

    model = Transformer(args, n_ids=args.n_ids, max_position=8)
    model.init_weights(0, CPU)
    return model


def test_mistakes(tmp_path):
    with pytest.raises(ConfigError, match="neither a folder step-N of a run nor a Hugging Face folder"):
        generate_main([str(tmp_path), "--prompt", "x"])
    with pytest.raises(ConfigError, match=r"run_state.json cannot be resumed from"):
        convert(tmp_path, tmp_path / "out", torch.float32, 1)


@pytest.mark.parametrize("flavor", ["llama3_8B", "7B"])
def test_config_json_there_and_back(flavor, tmp_path):
    args = resolve_model(Model(flavor=flavor), 128_256)
    (tmp_path / "config.json").write_text(json.dumps(write_hf_config(args, 4096, "bfloat16")))
    assert asdict(read_hf_config(str(tmp_path))) == asdict(args) | {"trained_context": 4096, "n_ids": 0}
    assert llama_configs[flavor].rope_scaling == args.rope_scaling


def test_files_of_a_limited_size():
    assert split_into_files({"a": 5, "b": 6, "c": 20, "d": 1}, 11) == [["a", "b"], ["c"], ["d"]]
    assert split_into_files({"a": 5}, 1) == [["a"]]
