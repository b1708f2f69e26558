"""What CompressedStage takes for granted of torch: if a release changes one of these, this says which."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from support.pages import ROOT
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.stages import compressed_stage, torch_stage
from thinwire.pipeline.stages.compressed_stage import CompressedStage
from thinwire.pipeline.stages.torch_stage import NEEDED, TorchStage

PUBLIC = {
    "clear_runtime_states": ["self"],
    "forward_one_chunk": ["self", "fwd_chunk_id", "args", "kwargs", "save_forward_output"],
    "backward_one_chunk": ["self", "bwd_chunk_id", "loss", "full_backward", "last_backward"],
    "backward_weight_one_chunk": ["self", "bwd_chunk_id", "last_backward"],
    "scale_grads": ["self", "grad_scale_factor"],
    "get_fwd_recv_ops": ["self", "fwd_chunk_id"],
    "get_bwd_recv_ops": ["self", "bwd_chunk_id"],
    "get_fwd_send_ops": ["self", "fwd_chunk_id"],
    "get_bwd_send_ops": ["self", "bwd_chunk_id"],
    "set_local_fwd_input": ["self", "prev_stage_outputs", "mb_index"],
    "get_local_bwd_output": ["self", "mb_index"],
    "set_local_bwd_input": ["self", "next_stage_bwd_outputs", "mb_index"],
}
PRIVATE = {
    "_prepare_forward_infra": ["self", "num_microbatches"],
    "_retrieve_recv_activations": ["self", "fwd_chunk_id"],
}
ONLY_IN_SOME_RELEASES = {
    "_get_init_p2p_neighbors_ops",
    "_validate_fwd_outputs",
    "_post_metadata_inference_cleanup",
    "_compute_outputs",
    "_recv_meta",
}


@pytest.mark.parametrize("hook", PUBLIC | PRIVATE)
def test_torch_has_the_hook_with_these_first_arguments(hook):
    arguments = list(inspect.signature(getattr(PipelineStage, hook)).parameters)
    assert arguments[: len((PUBLIC | PRIVATE)[hook])] == (PUBLIC | PRIVATE)[hook]


def test_torch_has_what_a_stage_calls():
    called = PipelineStage.backward_maybe_with_nosync
    assert list(inspect.signature(called).parameters) == ["self", "backward_type", "bwd_kwargs", "last_backward"]


def overridden(stage):
    base = set(dir(_PipelineStageBase)) | set(dir(PipelineStage))
    return {name for name in vars(stage) if name in base and callable(getattr(stage, name))} - {"__init__"}


def test_a_stage_overrides_public_methods_and_one_file_the_private_ones():
    assert overridden(CompressedStage) == set(PUBLIC)
    assert overridden(TorchStage) - ONLY_IN_SOME_RELEASES == {"forward_one_chunk", *PRIVATE}
    assert set(NEEDED) == set(PRIVATE)


def test_a_stage_reads_nothing_that_torch_keeps_private_nor_calls_its_own_things_the_same(alone):
    read = {node.attr for node in ast.walk(ast.parse(Path(compressed_stage.__file__).read_text())) if is_private(node)}
    assert len(read) > 30
    assert not read & {*dir(PipelineStage), *vars(bare_stage())}


def is_private(node):
    return isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")


@pytest.mark.parametrize(
    "attribute", ["args_recv_info", "grad_recv_info", "output_chunks", "stage_index_to_group_rank"]
)
def test_torch_keeps_what_a_stage_reads_where_it_looks(attribute, alone):
    assert attribute in vars(bare_stage())


def bare_stage():
    return PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"), torch.empty(3, 2), torch.empty(3, 2))


def test_an_unknown_torch_is_refused_by_name_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(torch_stage, "NEEDED", (*NEEDED, "_moved"))
    with pytest.raises(OptionsError) as caught:
        CompressedStage()
    assert str(caught.value) == (
        f"CompressedStage works with torch 2.11 to 2.15, got torch {torch.__version__}, whose PipelineStage has no "
        f"_moved; install one of these releases"
    )


def test_the_releases_that_are_named_are_those_that_setup_allows():
    oldest, newest = torch_stage.RELEASES.split(" to ")
    major, minor = newest.split(".")
    assert f"    torch>={oldest},<{major}.{int(minor) + 1}\n" in (ROOT / "setup.cfg").read_text()


def test_the_constructor_takes_torchs_arguments_in_torchs_order(alone):
    names = list(inspect.signature(PipelineStage).parameters)
    given = {
        "submodule": nn.Linear(2, 2),
        "stage_index": 0,
        "num_stages": 1,
        "device": torch.device("cpu"),
        "input_args": torch.empty(3, 2),
        "output_args": torch.empty(3, 2),
        "group": dist.new_group([0]),
        "dw_builder": lambda: None,
        "get_mesh": lambda *_: None,
    }
    assert set(names) - {"input_grads", "output_grads"} <= set(given)
    for by_name in (False, True):
        stage = (
            CompressedStage(**{name: given.get(name) for name in names})
            if by_name
            else CompressedStage(*(given.get(name) for name in names))
        )
        assert (stage.group, stage.dw_builder) == (given["group"], given["dw_builder"])
        assert [tuple(each.shape) for each in stage.outputs] == [(3, 2)]


@pytest.mark.parametrize("schedule", [torch_schedules.PipelineScheduleSingle, torch_schedules.PipelineScheduleMulti])
def test_every_step_begins_by_clearing_after_has_backward_is_set(schedule):
    source = inspect.getsource(schedule.step)
    assert 0 < source.index("has_backward = self._has_backward") < source.index("clear_runtime_states()")
    assert source.index("clear_runtime_states()") < source.index("self._step_microbatches(")


def test_the_runtime_takes_a_compute_only_order():
    assert list(inspect.signature(torch_schedules._PipelineScheduleRuntime._prepare_schedule_with_comms).parameters)[
        :2
    ] == [
        "self",
        "actions",
    ]
