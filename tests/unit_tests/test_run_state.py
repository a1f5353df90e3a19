"""What a checkpoint says about a run: nothing in it is trusted, and nothing is resumed that was made of other things."""

import itertools
import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from torchtitan_wlb.config import JobConfig
from torchtitan_wlb.cost.cost_model import CostModel
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.models.hf import resolve_model
from torchtitan_wlb.packing.document_order import DocumentOrder
from torchtitan_wlb.packing.objective import StepObjective
from torchtitan_wlb.packing.planner import StepPlanner
from torchtitan_wlb.packing.settings import resolve_settings
from torchtitan_wlb.run_state import (
    PlannerState,
    RunState,
    check_identity,
    identity,
    read_run_state,
    read_settings,
    write_settings,
)

COST = CostModel(pair_flops=0.05, token_cost=1.0, knots=(1,), rates=(1.0,))
MODEL = resolve_model(JobConfig().model, 258)
LENGTHS = np.minimum(np.random.default_rng(0).lognormal(3, 1, 500), 126).astype(int) + 2


def config(**sections) -> JobConfig:
    return JobConfig.model_validate({"training": {"seq_len": 128, "global_batch_size": 4}} | sections)


def resolve(c: JobConfig, cost=COST, alive=1):
    n = 4 if c.training.global_batch_size == -1 else c.training.global_batch_size
    return resolve_settings(
        c.training, c.packing, n=n, objective=StepObjective(n, 0.0), alive=alive, seed=c.debug.seed, cost=cost
    )


def planner(settings) -> StepPlanner:
    return StepPlanner(
        settings, DocumentOrder([200, 300], [1.0, 2.0], LENGTHS.__getitem__, settings.seed, settings.epochs)
    )


def made(c: JobConfig, steps=5) -> RunState:
    settings = replace(resolve(c), delay_price=0.2, thresholds=(40, 70))
    plan = list(itertools.islice(planner(settings), steps))[-1]
    made_with = identity(c, MODEL, Tokenizer("bytes"), None)
    return RunState(
        step=steps,
        settings=settings,
        planner=PlannerState.model_validate(plan.state),
        model=c.model,
        args=MODEL,
        made_with=made_with,
        rates={},
    )


def refused(kept: RunState, c: JobConfig, exclude=(), cost=COST, alive=1, **also) -> list[str]:
    try:
        tokenizer = Tokenizer("bytes", c.model.add_bos, c.model.add_eos)
        check_identity(
            kept, identity(c, resolve_model(c.model, 258), tokenizer, None) | also, resolve(c, cost, alive), c, exclude
        )
    except ConfigError as error:
        return [p.partition(":")[0].removeprefix("--") for p in error.problems]
    return []


def test_what_is_left_open_is_taken_from_the_checkpoint_and_costs_are_not_compared():
    kept = made(config(packing={"max_tokens_in_flight": 1024}))
    open_again = config(
        packing={"max_tokens_in_flight": 1024, "delay_price": "auto"},
        training={"seq_len": 128, "global_batch_size": -1},
    )
    assert refused(kept, open_again, cost=replace(COST, token_cost=7.0), alive=2) == []
    named = config(cost_model={"device": "h100"})
    assert refused(made(named), named, cost=replace(COST, token_cost=7.0)) == []  # another layout, the same device
    assert refused(made(named), config()) == []
    assert refused(made(config()), named) == ["cost_model.device"]


@pytest.mark.parametrize(
    "sections, flags",
    [
        ({"packing": {"strategy": "plain"}}, ["packing.strategy"]),
        ({"training": {"seq_len": 256}}, ["training.seq_len", "packing.max_len_factor (x training.seq_len)"]),
        ({"training": {"global_batch_size": 8, "seq_len": 128}}, ["training.global_batch_size"]),
        ({"model": {"add_bos": False}}, ["model.add_bos"]),
        ({"model": {"flavor": "debugmodel_deep"}, "debug": {"seed": 3}}, ["model.flavor", "debug.seed"]),
        (
            {"training": {"seq_len": 128, "global_batch_size": 4, "dataset": ("stdlib", "stdlib_files")}},
            ["training.dataset", "training.dataset_weight"],
        ),
        (
            {"training": {"seq_len": 128, "global_batch_size": 4, "loss_mask_column": "m", "long_documents": "drop"}},
            ["training.loss_mask_column", "training.long_documents"],
        ),
        ({"packing": {"max_tokens_in_flight": 512}}, ["packing.max_tokens_in_flight"]),
        ({"optimizer": {"name": "SGD"}}, ["optimizer.name"]),
    ],
)
def test_all_that_differs_is_named_by_flag_in_one_message(sections, flags):
    assert refused(made(config()), config(**sections)) == flags


def test_other_text_of_the_same_lengths_is_refused_and_excluded_parts_may_differ():
    kept = made(config())
    kept.made_with["training.dataset_path"] = "content a"
    assert refused(kept, config(), **{"training.dataset_path": "content b"}) == ["training.dataset_path"]
    other = config(model={"add_eos": False}, packing={"strategy": "plain"}, optimizer={"name": "SGD"})
    assert refused(kept, other, ("dataloader",)) == ["optimizer.name"]
    assert refused(kept, other, ("dataloader", "optimizer")) == []
    assert refused(kept, config(model={"flavor": "debugmodel_deep"}), ("dataloader", "optimizer")) == ["model.flavor"]


def change(table: dict, path: str, value) -> None:
    *parents, last = [int(x) if x.isdigit() else x for x in path.split(".")]
    for key in parents:
        table = table[key]
    if value is KeyError:
        del table[last]
    else:
        table[last] = value


HOSTILE = [
    ("step", 99), ("step", -5), ("step", True), ("step", "5"), ("step", 5.5), ("format", 1), ("format", KeyError),
    ("planner.step", 50), ("planner", []), ("planner.order.cursor", [-1, 3]), ("planner.order", None),
    ("planner.given_up", -3), ("planner.given_up", 1.5), ("settings.token_cost", 1), ("settings.seed", KeyError),
    ("settings.cost.token_cost", float("nan")), ("settings.cost.token_cost", 0.0), ("settings.cost.rates", [float("inf")]),
    ("settings.cost.rates", [-1.0]), ("settings.n", 0), ("settings.s_max", "150"), ("settings.max_delay", 0),
    ("settings.thresholds", [1.5]), ("made_with", {"model.flavor": 3}), ("made_with", []), ("extra", 1),
]  # fmt: skip


@pytest.mark.parametrize("path, value", HOSTILE)
def test_a_damaged_run_state_is_refused_in_one_sentence(tmp_path, path, value):
    folder = tmp_path / "step-5"
    folder.mkdir()
    table = json.loads(made(config()).model_dump_json())
    (folder / "run_state.json").write_text(json.dumps(table))
    assert read_run_state(folder) == made(config())
    change(table, path, value)
    (folder / "run_state.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"run_state.json cannot be resumed from \(.+\); choose another step"):
        read_run_state(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", "{", "\0", '{"format"', '"format"', '["format"]', "x" * 10_000]
)
def test_a_file_that_is_no_run_state(tmp_path, text):
    folder = tmp_path / "step-5"
    folder.mkdir()
    (folder / "run_state.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot be resumed from") as error:
        read_run_state(folder)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("strategy", ["plain", "plain_whole", "fixed", "wlb_paper", "wlb"])
def test_a_planner_state_goes_on_or_is_refused(strategy):
    settings = replace(resolve(config()), strategy=strategy, delay_price=0.2, thresholds=(40, 70), window=2)
    state = list(itertools.islice(planner(settings), 7))[-1].state
    straight, again = planner(settings), planner(settings)
    again.restore(json.loads(json.dumps(state)))
    assert [p.hash() for p in itertools.islice(again, 5)] == [p.hash() for p in itertools.islice(straight, 12)][7:]
    for path, value in [
        ("order.cursor", [3]), ("order.drawn_tokens", [10**9, 10**9]), ("order.drawn_tokens", [0, 0]),
        ("packer", [[[0, 0, 9, 1]]] * 7), ("packer", [[[0, 0]]]), ("packer", ["x"] * len(state["packer"]) or ["x"]),
        ("packer.0", [[600, 0, 9, 1]]), ("packer.0", [[-1, 0, 9, 1]]), ("packer.0", [[0, 0, 500, 1]]),
        ("packer.0", [[0, 5, 5, 1]]), ("packer.0", [[0, 0, 2, 8]]), ("packer.0", [[0, 0, 2, 0]]),
        ("packer.0", [[0, 0, 2**70, 1]]), ("packer.2", [float("nan"), 3]), ("packer.2", ["x", 3]),
    ]:  # fmt: skip
        damaged = json.loads(json.dumps(state))
        needs = int(path[-1]) if path[-1].isdigit() else -1
        if needs >= len(damaged["packer"]) or (needs == 2 and strategy != "wlb"):
            continue
        change(damaged, path, value)
        with pytest.raises(ConfigError, match="does not fit the documents"):
            planner(settings).restore(damaged)


def test_settings_are_what_json_gives_back():
    settings = made(config()).settings
    table = json.loads(json.dumps(asdict(settings)))
    state = json.loads(made(config()).model_dump_json()) | {"settings": table}
    assert RunState.model_validate_json(json.dumps(state)).settings == settings


def test_another_run_packs_by_the_settings_of_a_file(tmp_path):
    path, c = tmp_path / "packing_settings.json", config()
    settings = replace(resolve(c), delay_price=0.2, thresholds=(40, 70))
    write_settings(path, settings)
    elsewhere = resolve(config(training={"seq_len": 128, "global_batch_size": -1}), cost=replace(COST, token_cost=3.0))
    assert read_settings(path, elsewhere, config(training={"seq_len": 128})) == settings
    with pytest.raises(ConfigError, match=r"--training.seq_len: .*packing_settings.json has 128, configured is 256"):
        other = config(training={"seq_len": 256, "global_batch_size": 4})
        read_settings(path, resolve(other), other)
    for text in ("", "[]", path.read_text().replace('"n": 4', '"n": -4')):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"--packing.settings_from .*not the packing_settings.json of a run"):
            read_settings(path, settings, c)


def test_a_bound_on_the_tokens_of_a_step_is_compared_as_configured():
    bound = {"max_step_tokens_factor": 2.0}
    kept = made(config(packing=bound, training={"seq_len": 128, "global_batch_size": 8}))
    open_again = {"seq_len": 128, "global_batch_size": -1}  # here 4: the mean tokens of a step are others
    assert refused(kept, config(packing=bound, training=open_again)) == []
    assert refused(kept, config(training=open_again)) == ["packing.max_step_tokens_factor"]
