"""What CompressedStage takes for granted of torch: if a release changes one of these, this says which."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.stages.compressed_stage import CompressedStage
from thinwire.pipeline.stages.forward_states import require_forward_states

HOOKS = {
    "clear_runtime_states": ["self"],
    "_prepare_forward_infra": ["self", "num_microbatches"],
    "_prepare_backward_infra": ["self", "num_microbatches"],
    "forward_one_chunk": ["self", "fwd_chunk_id", "args", "kwargs", "save_forward_output"],
    "backward_one_chunk": ["self", "bwd_chunk_id"],
    "backward_weight_one_chunk": ["self", "bwd_chunk_id"],
    "backward_maybe_with_nosync": ["self", "backward_type", "bwd_kwargs", "last_backward"],
    "scale_grads": ["self", "grad_scale_factor"],
    "_retrieve_recv_activations": ["self", "fwd_chunk_id"],
    "_retrieve_recv_grads": ["self", "bwd_chunk_id"],
    "get_fwd_recv_ops": ["self", "fwd_chunk_id"],
    "get_bwd_recv_ops": ["self", "bwd_chunk_id"],
    "get_fwd_send_ops": ["self", "fwd_chunk_id"],
    "get_bwd_send_ops": ["self", "bwd_chunk_id"],
    "set_local_fwd_input": ["self", "prev_stage_outputs", "mb_index"],
    "get_local_bwd_output": ["self", "mb_index"],
    "set_local_bwd_input": ["self", "next_stage_bwd_outputs", "mb_index"],
}


@pytest.mark.parametrize("hook", HOOKS)
def test_torch_has_the_hook_with_these_first_arguments(hook):
    arguments = list(inspect.signature(getattr(PipelineStage, hook)).parameters)
    assert arguments[: len(HOOKS[hook])] == HOOKS[hook]


def test_no_other_hook_is_overridden():
    base = set(dir(_PipelineStageBase)) | set(dir(PipelineStage))
    overridden = {name for name in vars(CompressedStage) if name in base and callable(getattr(CompressedStage, name))}
    only_in_torch_2_11 = {"_get_init_p2p_neighbors_ops", "_validate_fwd_outputs"}
    only_in_torch_2_14 = {"_warmup_forward_vote", "_warmup_backward_result", "_post_metadata_inference_cleanup"}
    assert overridden - {"__init__", *only_in_torch_2_11, *only_in_torch_2_14} == set(HOOKS)


@pytest.mark.parametrize(
    "attribute",
    [
        "args_recv_info",
        "backward_state",
        "bwd_cache",
        "dw_runner",
        "grad_recv_info",
        "output_chunks",
        "stage_index_to_group_rank",
    ],
)
def test_the_stage_keeps_its_state_where_we_look(attribute):
    assert f"self.{attribute}" in inspect.getsource(_PipelineStageBase.__init__)


def test_forward_states_lie_where_one_of_these_releases_keeps_them(alone):
    source = inspect.getsource(_PipelineStageBase.__init__)
    assert "self._forward_chunk_states" in source or "self.fwd_cache" in source
    for name in ("_forward_chunk_states", "fwd_cache"):
        stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"), torch.empty(3, 2), torch.empty(3, 2))
        vars(stage).pop(name, None)
        if not {"_forward_chunk_states", "fwd_cache"} & set(vars(stage)):
            with pytest.raises(OptionsError, match=r"works with torch 2\.11 to 2\.15, got torch "):
                require_forward_states(stage)


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


def test_a_backward_in_two_parts_keeps_what_its_second_part_needs_second():
    source = inspect.getsource(_PipelineStageBase.backward_one_chunk)
    kept = source[source.index("self.backward_state[bwd_chunk_id] = (") :]
    assert kept.index("input_values") < kept.index("param_groups") < kept.index("stage_output")
    assert "param_groups" in inspect.getsource(_PipelineStageBase.backward_weight_one_chunk)


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
