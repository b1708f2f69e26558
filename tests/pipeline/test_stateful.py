"""Stages in checkpoints of torch.distributed.checkpoint: training goes on as if it had not stopped."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from thinwire.pipeline import CompressedStage, PipelineError, SavedStages, compressed

WIDTH, COUNT = 6, 4


def stages(codecs="ef(q(4))"):
    torch.manual_seed(0)
    example = torch.empty(2, WIDTH)
    with compressed(codecs):
        return [
            CompressedStage(nn.Linear(WIDTH, WIDTH), index, 2, torch.device("cpu"), example, example)
            for index in range(2)
        ]


def train(of, seed):
    """The losses of a step; weights stay, so that only buffers of feedback change them."""
    schedule = ScheduleInterleaved1F1B(of, COUNT, loss_fn=nn.functional.mse_loss)
    x, losses = torch.randn(COUNT * 2, WIDTH, generator=torch.Generator().manual_seed(seed)), []
    schedule.step(x, target=x, losses=losses)
    return [loss.item() for loss in losses]


def test_buffers_of_feedback_go_through_a_checkpoint_of_torch(alone, tmp_path):
    whole = stages()
    train(whole, 1)
    dcp.save({"thinwire": SavedStages(*whole)}, checkpoint_id=tmp_path)
    wanted, again = train(whole, 2), stages()
    dcp.load({"thinwire": SavedStages(*again)}, checkpoint_id=tmp_path)
    assert train(again, 2) == wanted
    assert train(stages(), 2) != wanted, "the buffers matter"


def test_the_state_of_before_the_first_step_empties_buffers(alone):
    """They stayed as they were, though passes were counted from the beginning again."""
    trained = stages()
    before = [stage.state_dict() for stage in trained]
    first, second = train(trained, 1), train(trained, 1)
    assert first != second
    for stage, state in zip(trained, before, strict=True):
        stage.load_state_dict(state)
    assert [train(trained, 1), train(trained, 1)] == [first, second]


@pytest.mark.parametrize("codecs", ["q(8)", "ef21(q(4))", 'ef(q(4), slot="sample")'])
def test_the_state_of_other_codecs_is_refused(alone, codecs):
    """The sentence asked for the number of samples, which has nothing to do with it.

    ef21 took the errors of the sender for values that both ends have, and was wrong by them from then on.
    """
    whole, others = stages(), stages(codecs)
    train(whole, 1)
    for stage, other in zip(whole, others, strict=True):
        other.load_state_dict(stage.state_dict())
    with pytest.raises(PipelineError, match=r"stage 0 must be given the state of .* the same .* codecs; take"):
        train(others, 2)


def test_stages_of_two_pipelines_are_not_saved_as_one(alone):
    """The second took the place of the first, and the buffers of the first were lost."""
    with pytest.raises(PipelineError, match=r"takes the stages of one pipeline, each once, got stages \[0, 1, 0, 1\];"):
        SavedStages(*stages(), *stages())
