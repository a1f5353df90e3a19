"""Configuration: three layers, and every mistake in one message with the flag and what is legal."""

import dataclasses
from pathlib import Path

import pytest

from torchtitan_wlb.config import JobConfig, Training
from torchtitan_wlb.config_checks import settings_without_effect, validate
from torchtitan_wlb.config_manager import load_config
from torchtitan_wlb.errors import ConfigError

ROOT = Path(__file__).parents[2]
DEBUG = ["--job.config_file", str(ROOT / "train_configs/debug_cpu.toml")]


def test_command_line_wins_over_toml_over_default():
    config = load_config([*DEBUG, "--training.steps", "7", "--metrics.enable_color=false", "--checkpoint.enable"])
    assert (config.training.steps, config.training.seq_len, config.optimizer.beta2) == (7, 4096, 0.95)
    assert config.metrics.enable_color is False and config.checkpoint.enable is True
    assert config.training.dataset == ("stdlib",)
    config = load_config(
        ["--training.dataset", "text", "json", "--packing.outlier_thresholds=100", "--optimizer.lr", "-1e-3"]
    )
    assert config.training.dataset == ("text", "json") and config.packing.outlier_thresholds == (100,)
    assert config.optimizer.lr == -1e-3


@pytest.mark.parametrize("recipe", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda p: p.name)
def test_every_recipe_is_valid(recipe):
    config = load_config(["--job.config_file", str(recipe)])
    assert recipe.read_text().splitlines()[1].startswith("# Hardware:")
    p = config.parallelism
    fixed = (
        p.data_parallel_replicate_degree
        * p.tensor_parallel_degree
        * p.context_parallel_degree
        * p.pipeline_parallel_degree
    )
    validate(config, fixed * max(1, p.data_parallel_shard_degree))


def test_every_field_is_documented():
    import ast

    tree = ast.parse((ROOT / "torchtitan_wlb/config.py").read_text())
    for cls in [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name not in ("JobConfig", "ConfigError")]:
        fields = [(a, b) for a, b in zip(cls.body, [*cls.body[1:], None]) if isinstance(a, ast.AnnAssign)]
        assert fields and all(isinstance(b, ast.Expr) for _, b in fields), cls.name
    assert {f.name for f in dataclasses.fields(JobConfig)} >= {
        "job",
        "training",
        "packing",
        "context_parallel",
        "cost_model",
    }


BAD = [
    (["--parallelism.tensor_parallel_degree", "3"], 4, r"tensor_parallel_degree 3: 4 heads, 2 key/value heads.* allow 1, 2, 4"),
    (["--parallelism.context_parallel_degree", "4"], 4, r"do not multiply.*context_parallel_degree 4.*= 8, WORLD_SIZE = 4"),
    (["--parallelism.pipeline_parallel_degree", "8"], 16, r"pipeline_parallel_degree 8 makes 8 stages, debugmodel has 4 layers"),
    (["--parallelism.pipeline_parallel_degree=0"], 4, r"pipeline_parallel_degree 0: must be at least 1"),
    (["--training.global_batch_size", "3", "--parallelism.data_parallel_shard_degree", "2"], 8, r"global_batch_size 3: must be a multiple of the 2"),
    (["--training.global_batch_size", "1"], 4, r"global_batch_size 1 gives 1 micro-batches.*1F1B needs at least 2"),
    (["--training.seq_len", "4094"], 4, r"seq_len 4094: must be a multiple of CP x lcm\(2, TP\) = 4"),
    (["--training.seq_len_multiple", "60"], 4, r"seq_len_multiple 60: must divide --training.seq_len 4096"),
    (["--training.seqlen", "4096"], 4, r"\[training\] has no key 'seqlen'; nearest: seq_len"),
    (["--trainig.seq_len", "4096"], 4, r"no section 'trainig'; nearest: training"),
    (["--training.steps", "many"], 4, r"training.steps = 'many': input should be a valid integer"),
    (["--packing.strategy", "best"], 4, r"packing.strategy = 'best': input should be 'plain', 'plain_whole', 'fixed', 'fixed_solver', 'wlb_paper' or 'wlb'"),
    (["--packing.max_len_factor", "0.5"], 4, r"max_len_factor 0.5: must lie in 1.0..100"),
    (["--packing.outlier_thresholds", "900", "300"], 4, r"outlier_thresholds 900 300: must rise and lie in 1..4096"),
    (["--packing.delay_price", "0"], 4, r"delay_price 0.0: must be auto or above 0"),
    (["--packing.max_tokens_in_flight", "4096"], 4, r"max_tokens_in_flight 4096: must be 0 or at least .* = 8192"),
    (["--debug.seed", "-1", "--optimizer.lr", "nan", "--checkpoint.keep_latest_k", "-1"], 4, r"keep_latest_k -1: must be at least 0"),
    (["--parallelism.pipeline_parallel_schedule", "DualPipeV", "--training.global_batch_size", "3"], 4, r"3 micro-batches .*DualPipeV needs at least 4"),
    (["--model.flavor", "9B"], 4, r"model.flavor 9B: legal are debugmodel, "),
    (["--training.dataset", "wikipedia"], 4, r"training.dataset wikipedia: legal are stdlib, "),
    (["--training.dataset", "text"], 4, r"dataset text needs --training.dataset_path"),
    (["--training.dataset", "stdlib", "stdlib_files", "--training.dataset_weight", "1"], 4, r"dataset_weight .* one positive number for each"),
    (["steps", "5"], 4, r"'steps' is not a flag"),
    (["--training.steps"], 4, r"--training.steps needs a value"),
    (["--job.config_file", "nowhere.toml"], 4, r"nowhere.toml: No such file"),
]  # fmt: skip


@pytest.mark.parametrize("flags, world_size, message", BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_mistakes_are_named(flags, world_size, message):
    with pytest.raises(ConfigError, match=message):
        validate(load_config([*DEBUG, *flags]), world_size)


def test_toml_types_are_strict(tmp_path):
    toml = tmp_path / "t.toml"
    toml.write_text("[training]\nsteps = true\nseq_len = '4096'\n[checkpoint]\nenable = 'yes'\n[optimizer]\nlr = 1\n")
    with pytest.raises(ConfigError) as error:
        load_config(["--job.config_file", str(toml)])
    assert len(error.value.problems) == 3


def test_lengths_are_rounded_to_a_128th_of_the_window():
    for window, multiple in ((131072, 1024), (8192, 64), (4096, 32), (6000, 16), (100, 1)):
        assert Training(seq_len=window).length_multiple == multiple
    assert Training(seq_len=4096, seq_len_multiple=64).length_multiple == 64


def test_settings_without_effect_are_named():
    config = load_config(
        [*DEBUG, "--packing.window", "4", "--checkpoint.load_step", "7", "--parallelism.context_parallel_degree", "1"]
    )
    named = " ".join(settings_without_effect(config))
    for part in ("packing.window 4", "checkpoint.load_step 7", "context_parallel.sharding per_document"):
        assert part in named
    assert settings_without_effect(load_config(DEBUG)) == []


def test_all_problems_come_in_one_message(tmp_path):
    toml = tmp_path / "bad.toml"
    toml.write_text("[training]\nsteps = 'x'\nsequence_length = 1\n[pack]\nn = 1\n[model]\nflavor = 3\n")
    with pytest.raises(ConfigError) as error:
        load_config(["--job.config_file", str(toml), "--metrics.log_freq", "often"])
    text = str(error.value)
    assert text.count("\n  - ") == 5, text
    for part in (
        "training.steps",
        "sequence_length",
        "'pack'; nearest: packing",
        "model.flavor = 3",
        "metrics.log_freq = 'often'",
    ):
        assert part in text
