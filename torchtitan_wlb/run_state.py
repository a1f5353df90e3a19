"""What a checkpoint holds beside tensors: how far training came, what decides packing, and what the run was made with.

One JSON file, global and equal on all ranks, read before any process group exists. Nothing in it is trusted: types,
ranges and what must agree are checked when it is read.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter

from torchtitan_wlb.config import JobConfig, Model
from torchtitan_wlb.cost.profile import Profile
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError, first_reason
from torchtitan_wlb.models.model_args import ModelArgs, llama_configs
from torchtitan_wlb.packing.settings import PackingSettings, differences, fields_left_open

FILE = "run_state.json"
_SETTINGS = TypeAdapter(PackingSettings)


class _Typed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class OrderState(_Typed):
    """Of packing/document_order.py: documents and tokens drawn of every source."""

    cursor: list[NonNegativeInt]
    drawn_tokens: list[NonNegativeInt]


class PlannerState(_Typed):
    """Of packing/planner.py, after a step; the planner checks it against the documents."""

    step: PositiveInt
    order: OrderState
    packer: list
    given_up: NonNegativeInt


class RunState(_Typed):
    """Of a run after a step.

    Attributes:
        format: of this file.
        step: trained last. settings: what decides packing, resolved. planner: how far the documents are.
        model: its section as configured. args: what it became.
        made_with: {flag: value as configured} of what else decides what is trained (see `identity`).
        rates: {flag: value as configured} of the optimizer and the schedule; on resume the configured ones count.
    """

    format: Literal[3] = 3
    step: PositiveInt
    settings: PackingSettings
    planner: PlannerState
    model: Model
    args: ModelArgs
    made_with: dict[str, str]
    rates: dict[str, str]


def read_run_state(checkpoint: Path) -> RunState:
    """The run state of a checkpoint.

    Raises:
        ConfigError: the file is missing, damaged, or of another version.
    """
    path = checkpoint / FILE
    try:
        text = path.read_text()
        if '"format"' not in text:
            raise ValueError("it was written by an earlier version, or is no run state")
        state = RunState.model_validate_json(text)
        if not state.planner.step <= state.step == int(checkpoint.name.removeprefix("step-")):
            raise ValueError(f"it is of step {state.step}, its planner of step {state.planner.step}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--checkpoint.load_step: {path} cannot be resumed from ({first_reason(error)}); choose another step, or "
            "move the checkpoint away"
        ) from error
    return state


def write_settings(path: Path, settings: PackingSettings) -> None:
    """For packing.settings_from of another run."""
    path.write_text(_SETTINGS.dump_json(settings, indent=2).decode())


def read_settings(path: Path, configured: PackingSettings, config: JobConfig) -> PackingSettings:
    """The settings that another run wrote.

    Args:
        configured: as this run would resolve them.

    Raises:
        ConfigError: no such file, or the configuration asks for something else.
    """
    try:
        settings = _SETTINGS.validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--packing.settings_from {path}: not the packing_settings.json of a run ({first_reason(error)})"
        ) from error
    left_open = fields_left_open(config.training, config.packing)
    if problems := differences(settings, configured, left_open, made_with=f"{path} has"):
        raise ConfigError(*problems)
    return settings


def identity(config: JobConfig, model: ModelArgs, tokenizer: Tokenizer, profile: Profile | None) -> dict[str, str]:
    """{flag: value} of what decides what is trained, as configured, besides the packing settings. The content of the
    documents is added when they are known."""
    t = config.training
    return {
        "model.flavor": config.model.flavor if config.model.flavor in llama_configs else str(model),
        "model.rope_scaling": f"{model.rope_theta:g} {model.rope_scaling}",
        "model.tokenizer": tokenizer.identity,
        "model.add_bos": str(config.model.add_bos),
        "model.add_eos": str(config.model.add_eos),
        "optimizer.name": config.optimizer.name,
        "training.dataset": " ".join(t.dataset),
        "training.dataset_weight": " ".join(map(str, t.dataset_weight or (1.0,) * len(t.dataset))),
        "training.loss_mask_column": t.loss_mask_column,
        "training.long_documents": t.long_documents,
        "cost_model.device": config.cost_model.device,
        "cost_model.profile": profile.content if profile else "",
    }


def rates(config: JobConfig) -> dict[str, str]:
    """{flag: value} of the optimizer and its schedule."""
    sections = {"optimizer": config.optimizer, "lr_scheduler": config.lr_scheduler}
    return {f"{name}.{k}": str(v) for name, section in sections.items() for k, v in section.model_dump().items()}


def check_identity(
    kept: RunState,
    made_with: dict[str, str],
    settings: PackingSettings,
    config: JobConfig,
    exclude: tuple[str, ...] = (),
) -> None:
    """Refuse to resume a run that is configured differently from how it was made.

    Args:
        made_with: of this run, see `identity`. settings: as a fresh run would resolve them.
        exclude: checkpoint.exclude_from_loading. Documents that start anew may be others; a new optimizer too.

    Raises:
        ConfigError: every difference, with its flag and both values.
    """
    costs = ("cost_model.device", "cost_model.profile")
    problems = []
    for flag, value in made_with.items():
        is_for_documents = flag.startswith(("training.", "cost_model.", "model.add_"))
        if ("dataloader" in exclude and is_for_documents) or ("optimizer" in exclude and flag == "optimizer.name"):
            continue
        if flag in costs and config.cost_model.device == "auto" and not config.cost_model.profile:
            continue  # nothing is asked for: costs stay what they were
        if kept.made_with.get(flag) != value:
            made = kept.made_with.get(flag) or "(nothing)"
            problems.append(f"--{flag}: the checkpoint was made with {made}, configured is {value or '(nothing)'}")
    if "dataloader" not in exclude:
        problems += differences(kept.settings, settings, fields_left_open(config.training, config.packing))
    if problems:
        raise ConfigError(*problems)
