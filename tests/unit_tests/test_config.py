"""Configuration: three layers, and every mistake in one message with the flag and what is legal."""

import re
from pathlib import Path
from typing import get_args

import pytest

from torchtitan_wlb.config import Parallelism, Training
from torchtitan_wlb.config_checks import _ANY_COST as ANY_COST
from torchtitan_wlb.config_checks import settings_without_effect, validate
from torchtitan_wlb.config_manager import MOVED, SECTIONS, help_text, load_config
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.layout_packing import resolve_batch, resolve_packing

ROOT = Path(__file__).parents[2]
DEBUG = ["--job.config_file", str(ROOT / "train_configs/debug_cpu.toml")]


def test_command_line_wins_over_toml_over_default():
    config = load_config([*DEBUG, "--training.steps", "7", "--metrics.enable_color=false", "--checkpoint.enable"])
    assert (config.training.steps, config.training.seq_len, config.optimizer.beta2) == (7, 4096, 0.95)
    assert config.metrics.enable_color is False and config.checkpoint.enable is True
    assert config.training.dataset == ("stdlib",)
    config = load_config(
        ["--training.dataset", "text", "json", "--packing.outlier_thresholds=100", "--debug.seed", "3"]
    )
    assert config.training.dataset == ("text", "json") and config.packing.outlier_thresholds == (100,)
    assert config.debug.seed == 3


@pytest.mark.parametrize("recipe", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda p: p.name)
def test_every_recipe_is_valid(recipe):
    config = load_config(["--job.config_file", str(recipe)])
    assert recipe.read_text().splitlines()[1].startswith("# Hardware:")
    config.checkpoint.initial_load_path = ""  # to be downloaded
    p = config.parallelism
    fixed = (
        p.data_parallel_replicate_degree
        * p.tensor_parallel_degree
        * p.context_parallel_degree
        * p.pipeline_parallel_degree
    )
    validate(config, fixed * max(1, p.data_parallel_shard_degree))


def test_every_field_is_documented():
    assert set(SECTIONS) >= {"job", "training", "packing", "context_parallel", "cost_model"}
    for section, cls in SECTIONS.items():
        assert all(info.description for info in cls.model_fields.values()), section


BAD = [
    (["--parallelism.tensor_parallel_degree", "3"], 4, r"tensor_parallel_degree 3: 4 heads, 2 key/value heads.* allow 1, 2, 4"),
    (["--parallelism.context_parallel_degree", "4"], 4, r"do not multiply.*context_parallel_degree 4.*= 8, WORLD_SIZE = 4"),
    (["--parallelism.pipeline_parallel_degree", "8"], 16, r"pipeline_parallel_degree 8 makes 8 stages, debugmodel has 4 layers"),
    (["--parallelism.pipeline_parallel_degree=0"], 4, r"pipeline_parallel_degree 0: input should be greater than or equal to 1"),
    (["--parallelism.data_parallel_shard_degree", "-2"], 4, r"data_parallel_shard_degree -2: must be -1 or at least 1"),
    (["--training.global_batch_size", "3", "--parallelism.data_parallel_shard_degree", "2"], 8, r"global_batch_size 3: must be a multiple of the 2"),
    (["--training.global_batch_size", "1"], 4, r"global_batch_size 1 gives 1 micro-batches.*1F1B needs at least 2"),
    (["--training.seq_len", "4094"], 4, r"seq_len 4094: must be a multiple of CP x lcm\(2, TP\) = 4"),
    (["--training.seq_len", "10000000000000"], 4, r"seq_len 10000000000000: input should be less than or equal to"),
    (["--training.seq_len_multiple", "60"], 4, r"seq_len_multiple 60: must divide --training.seq_len 4096"),
    (["--training.seqlen", "4096"], 4, r"\[training\] has no key 'seqlen'; nearest: seq_len"),
    (["--trainig.seq_len", "4096"], 4, r"no section 'trainig'; nearest: training"),
    (["--training.num_workers", "5000"], 4, r"num_workers 5000: input should be less than or equal to 64"),
    (["--training.steps", "many"], 4, r"--training.steps many: input should be a valid integer"),
    (["--training.steps", "many", "--training.steps", "7"], 4, r"--training.steps many: input should be a valid integer"),
    (["--packing.strategy", "best"], 4, r"packing.strategy best: input should be 'plain', 'plain_whole', 'fixed', 'fixed_solver', 'wlb_paper' or 'wlb'"),
    (["--packing.max_len_factor", "0.5"], 4, r"max_len_factor 0.5: input should be greater than or equal to 1"),
    (["--packing.outlier_thresholds", "900", "300"], 4, r"outlier_thresholds 900 300: must rise and lie in 1..4096"),
    (["--packing.outlier_thresholds"], 4, r"outlier_thresholds : tuple should have at least 1 item"),
    (["--packing.delay_price", "0"], 4, r"delay_price 0: input should be greater than 0"),
    (["--packing.delay_price", "inf"], 4, r"delay_price inf: input should be a finite number"),
    (["--packing.window", "100000000"], 4, r"window 100000000: input should be less than or equal to 1024"),
    (["--packing.max_delay_steps", "3"], 4, r"max_delay_steps 3: must be at least 4 with 4 micro-batches of at most 6144 tokens"),
    (["--packing.strategy", "fixed", "--packing.window", "8"], 4, r"max_delay_steps 15: must be at least 22 with .*--packing.strategy fixed"),
    (["--packing.max_tokens_in_flight", "4096"], 4, r"max_tokens_in_flight 4096: must be 0 or at least .* = 8192"),
    (["--packing.max_tokens_in_flight", "3", "--training.seq_len_multiple", "64"], 4, r"max_tokens_in_flight 3: must be 0"),
    (["--training.seq_len_multiple", "50000"], 4, r"seq_len_multiple 50000: must divide --training.seq_len 4096"),
    (["--training.seq_len", "1000", "--parallelism.data_parallel_shard_degree", "1", "--parallelism.context_parallel_degree", "4"],
     4, r"max_len_factor 1.5: S_max = 1500 tokens must be a multiple of CP x lcm\(2, TP\) = 8, .*; 1.496 is"),
    (["--packing.max_tokens_in_flight", "8192", "--training.seq_len_multiple", "2"], 4,
     r"seq_len_multiple 2: must be a multiple of CP x lcm\(2, TP\) = 4"),
    (["--debug.seed", "-1", "--optimizer.lr", "nan", "--checkpoint.keep_latest_k", "-1"], 4, r"keep_latest_k -1: input should be greater than or equal to 0"),
    (["--lr_scheduler.min_lr_factor", "-5"], 4, r"min_lr_factor -5: input should be greater than or equal to 0"),
    (["--lr_scheduler.warmup_steps", "50"], 4, r"warmup_steps 50: the schedule has 30 steps"),
    (["--parallelism.pipeline_parallel_schedule", "DualPipeV", "--training.global_batch_size", "3"], 4, r"3 micro-batches .*DualPipeV needs at least 4"),
    (["--checkpoint.folder", "/dev/null/x"], 4, r"checkpoint.folder /dev/null/x: must be the name of a folder under --job.dump_folder"),
    (["--metrics.save_tb_folder", "../tb"], 4, r"save_tb_folder ../tb: must be the name"),
    (["--parallelism.reshard_after_forward", "always", "--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"], 4, r"ZBVZeroBubble splits backward, which then loses"),
    (["--training.micro_batch_tokens", "5000"], 4, r"micro_batch_tokens 5000: legal are 1 to 4096"),
    (["--training.micro_batch_tokens", "2048", "--packing.strategy", "plain"], 4, r"2048: legal are -1 or 4096 with plain"),
    (["--training.micro_batch_tokens", "half"], 4, r"micro_batch_tokens half: input should be"),
    (["--packing.max_step_tokens_factor", "0.5"], 4, r"max_step_tokens_factor 0.5: must be 0 or at least 1"),
    (["--model.flavor", "9B"], 4, r"model.flavor 9B: legal are debugmodel, "),
    (["--training.dataset", "wikipedia"], 4, r"training.dataset wikipedia: legal are stdlib, "),
    (["--training.dataset", "text"], 4, r"dataset text needs --training.dataset_path"),
    (["--training.dataset", "stdlib", "stdlib_files", "--training.dataset_weight", "1"], 4, r"dataset_weight .* one positive number for each"),
    (["--training.dataset_weight", "nan"], 4, r"dataset_weight nan: input should be"),
    (["steps", "5"], 4, r"'steps' is not a flag"),
    (["--training.steps"], 4, r"--training.steps needs a value"),
    (["--checkpoint", "true"], 4, r"--checkpoint: a section, not a key; its keys: enable, folder"),
    (["--training.", "1"], 4, r"--training.: a section, not a key"),
    (["--job.config_file", "nowhere.toml"], 4, r"nowhere.toml: No such file"),
    (["--job.config_file", ""], 4, r"--job.config_file : No such file"),
    (["--training.compile"], 4, r"--training.compile: here it is compile.enable"),
    (["--training.data_parallel_shard_degree", "2"], 4, r"here it is parallelism.data_parallel_shard_degree"),
    (["--training.tensor_parallel_degree", "2"], 4, r"here it is parallelism.tensor_parallel_degree"),
    (["--experimental.context_parallel_degree", "2"], 4, r"here it is parallelism.context_parallel_degree"),
    (["--experimental.pipeline_parallel_degree", "2"], 4, r"here it is parallelism.pipeline_parallel_degree"),
    (["--experimental.pipeline_parallel_schedule", "1F1B"], 4, r"here it is parallelism.pipeline_parallel_schedule"),
    (["--training.warmup_steps", "2"], 4, r"here it is lr_scheduler.warmup_steps"),
    (["--checkpoint.enable_checkpoint"], 4, r"here it is checkpoint.enable"),
    (["--model.tokenizer_path", "t.model"], 4, r"here it is model.tokenizer"),
    (["--model.norm_type", "rmsnorm"], 4, r"the norm is RMSNorm"),
    (["--metrics.disable_color_printing"], 4, r"here it is metrics.enable_color"),
    (["--training.fsdp_reshard_after_forward", "never"], 4, r"here it is parallelism.reshard_after_forward"),
    (["--activation_checkpoint.selective_ac_option", "mm"], 4, r"op"),
    (["--training.seed", "1"], 4, r"here it is debug.seed"),
    (["--training.batch_size", "8"], 4, r"here it is training.global_batch_size"),
]  # fmt: skip


@pytest.mark.parametrize("flags, world_size, message", BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_mistakes_are_named(flags, world_size, message):
    recipe = [] if "--job.config_file" in flags else DEBUG
    with pytest.raises(ConfigError, match=message):
        validate(load_config([*recipe, *flags]), world_size)


def test_what_moved_names_keys_that_exist():
    for old, new in MOVED.items():
        section, key = old.split(".")
        assert section not in SECTIONS or key not in SECTIONS[section].model_fields, old
        for name in re.findall(r"[a-z_]+\.[a-z_]+", new):
            section, key = name.split(".")
            assert key in SECTIONS[section].model_fields, (old, new)


def test_the_default_batch_suits_every_schedule():
    for schedule in get_args(Parallelism.model_fields["pipeline_parallel_schedule"].annotation):
        flags = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", schedule]
        config = load_config([*flags, "--training.global_batch_size", "-1"])
        dims = validate(config, 4)
        assert resolve_batch(config, dims) == 2 * (4 if schedule == "DualPipeV" else 2)


def test_help_shows_every_key_and_the_whole_text_of_a_section(capsys):
    with pytest.raises(SystemExit) as ended:
        load_config(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and max(map(len, text.splitlines())) <= 120 and len(text.splitlines()) < 200
    for section, cls in SECTIONS.items():
        assert f"[{section}]" in text and all(f"\n  {key} = " in text for key in cls.model_fields)
    assert "one step earlier" not in text and "one step earlier" in " ".join(help_text(["packing"]).split())


def test_toml_types_are_strict(tmp_path):
    toml = tmp_path / "t.toml"
    toml.write_text(
        "[training]\nsteps = true\nseq_len = '4096'\n[checkpoint]\nenable = 'yes'\n[optimizer]\nlr = 1\n"
        "[packing]\ndelay_price = true\noutlier_thresholds = []\n"
    )
    with pytest.raises(ConfigError) as error:
        load_config(["--job.config_file", str(toml)])
    assert len(error.value.problems) == 5


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
        f"training.steps = 'x' in {toml}: input should be a valid integer",
        "sequence_length",
        "'pack'; nearest: packing",
        f"model.flavor = 3 in {toml}: input should be a valid string",
        "--metrics.log_freq often: input should be a valid integer",
    ):
        assert part in text


def test_auto_offers_what_the_schedule_takes_with_the_same_tokens():
    def sizes(*flags):
        config = load_config([*DEBUG, "--training.micro_batch_tokens", "auto", *flags])
        return [(s.n, s.micro_batch_tokens) for s in resolve_packing(config, validate(config, 4), ANY_COST)]

    assert sizes() == [(4 * k, 4096 // k) for k in (1, 2, 3, 4, 6, 8)]
    uneven = ["--training.global_batch_size", "3", "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"]
    assert [n for n, _ in sizes(*uneven)] == [3 * k for k in (1, 2, 4, 6, 8) if 3 * k % max(1, 3 * k // 2) == 0]
    assert sizes("--packing.strategy", "plain") == [(4, 4096)]


def test_wlb_packs_for_who_waits_for_whom():
    def objectives(*flags, world_size=4):
        config = load_config(["--training.global_batch_size", "16", *flags])
        return [
            (s.objective.dp, s.objective.bubble)
            for s in resolve_packing(config, validate(config, world_size), ANY_COST)
        ]

    reshard = "--parallelism.reshard_after_forward"
    assert objectives() == objectives(reshard, "never") == [(4, 0.0)]
    assert objectives(reshard, "always") == [(16, 0.0)]  # ranks gather parameters for every micro-batch
    assert objectives(reshard, "always", world_size=1) == [(1, 0.0)]  # with nobody to wait for
    assert objectives("--parallelism.pipeline_parallel_degree", "4", reshard, "always") == [(1, 3.0)]
