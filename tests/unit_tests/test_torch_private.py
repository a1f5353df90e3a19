"""The private names of torch are as they were when they were run; if not, this says which and on which torch."""

import importlib
import inspect
from pathlib import Path

import pytest
import torch

from torchtitan_wlb import torch_private
from torchtitan_wlb.config_manager import tomllib
from torchtitan_wlb.torch_private import PRIVATE

RUN_WITH = ("2.13", "2.14")
_FLASH = "dropout_p is_causal return_debug_mask scale window_size_left window_size_right seqused_k alibi_slopes block_table num_splits"
# Parameters of what is called or overridden, in the forms that were run.
PARAMETERS = {
    "prepare_schedule": ["self actions format"],
    "step_microbatches": ["self arg_mbs kwarg_mbs target_mbs losses return_outputs loss_kwargs"],
    "add_unshard_reshard": ["compute_actions max_active_stages"],
    "add_send_recv": ["compute_actions stage_to_rank num_stages"],
    "Action": ["stage_index computation_type microbatch_index sub_actions"],
    "RecvInfo": ["input_name source buffer tensor_meta is_root_arg"],
    "get_recv_ops": ["self recv_infos", "self recv_infos group"],
    "extract_tensor_meta": ["tensor"],
    "extract_tensor_metas": ["tensors allow_none"],
    "prepare_forward": ["self num_microbatches args kwargs has_backward"],
    "prepare_backward": ["self num_microbatches loss_fn target received_grad_meta loss_kwargs"],
    "metadata_cleanup": ["self"],
    "flatten_mesh": ["self mesh_dim_name backend_override"],
    "concatenate_meshes": ["device_mesh_list"],
    "set_timeout": ["timeout group"],
    "checkpoint_wrapper": ["module checkpoint_impl checkpoint_fn checkpoint_fn_kwargs"],
    "generate_indices": ["self restore"],
    "all_gather": ["input group_size group_name"],
    "reduce_scatter": ["input reduce_op group_size group_name"],
    "wait_tensor": ["tensor"],
    "cpu_flash": ["query key value dropout_p is_causal attn_mask scale"],
    "cpu_flash_backward": ["grad_out query key value out logsumexp dropout_p is_causal attn_mask scale"],
    "cuda_flash": [f"query key value cum_seq_q cum_seq_k max_q max_k {_FLASH}"],
    "cuda_flash_backward": [
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused scale "
        "window_size_left window_size_right"
    ],
}


def changes(name: str, run: list[str]) -> str:
    """What of a private name is not as it was run, "" if nothing."""
    try:
        found = getattr(torch_private, name)
    except (AttributeError, ImportError) as error:
        return f"torch {torch.__version__} has no {PRIVATE[name]} any more ({error})"
    if not run:
        return ""
    if hasattr(found, "overloads"):  # an operator
        now = " ".join(a.name for a in getattr(found, found.overloads()[0])._schema.arguments)
    else:
        now = " ".join(inspect.signature(found).parameters)
    if now in run:
        return ""
    return f"torch {torch.__version__}: {PRIVATE[name]} takes ({now}), it was run with ({') or ('.join(run)})"


@pytest.mark.parametrize("name", PRIVATE)
def test_private_name_is_as_it_was_run(name):
    problem = changes(name, PARAMETERS.get(name, []))
    assert not problem, problem


def test_a_changed_signature_is_named(monkeypatch):
    stage = importlib.import_module("torch.distributed.pipelining.stage")
    monkeypatch.setattr(stage.PipelineStage, "_get_recv_ops", lambda self, infos, group, peer: None)
    assert changes("get_recv_ops", PARAMETERS["get_recv_ops"]) == (
        f"torch {torch.__version__}: torch.distributed.pipelining.stage:PipelineStage._get_recv_ops takes "
        "(self infos group peer), it was run with (self recv_infos) or (self recv_infos group)"
    )
    monkeypatch.delattr(stage, "_RecvInfo")
    assert "has no torch.distributed.pipelining.stage:_RecvInfo any more" in changes("RecvInfo", [])
    with pytest.raises(AttributeError):
        torch_private.no_such_name  # noqa: B018


def test_the_declared_range_is_what_was_run():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (torch_range,) = [d for d in project["dependencies"] if d.startswith("torch>")]
    first, last = RUN_WITH
    major, minor = map(int, last.split("."))
    assert torch_range == f"torch>={first},<{major}.{minor + 1}"
