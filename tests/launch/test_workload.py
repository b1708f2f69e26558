"""What a workload says of its frames is what the boundary sends."""

import pytest
import torch

from support.workloads import uniform
from thinwire.compress import Encoder, Microbatch, SlotCounts, parse
from thinwire.compress.stores.memory import MemoryStore
from thinwire.launch.shared.links import Network
from thinwire.launch.timing.workload import codec_pair, frame_bytes, label
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.measuring.meters import Meter
from thinwire.pipeline.options import BoundaryOptions, CompressionOptions
from thinwire.pipeline.wire.boundary import ChannelEnd
from thinwire.pipeline.wire.channel import Channel

HIDDEN = torch.empty(2, 6, 10, device="meta", requires_grad=True)
MASK = torch.empty(2, 6, dtype=torch.int64, device="meta")


def in_memory(layout, purpose):
    return MemoryStore(layout)


@pytest.mark.parametrize("expression", ["none", "bf16", "q(3)", "topk(0.1)", "ef(topk(0.1))", "ef21(q(4))"])
@pytest.mark.parametrize("name", ["activations", "gradients"])
def test_frames_are_as_long_as_the_boundary_plans_them(expression, name):
    examples = (HIDDEN, MASK) if name == "activations" else (HIDDEN,)
    channel = Channel(0, name, examples, parse(expression), seed=0)
    coders = [
        Encoder(
            method,
            example,
            counts=SlotCounts(positions=2),
            make_store=lambda layout, _: MemoryStore(layout),
        )
        for method, example in zip(channel.methods, examples, strict=True)
    ]
    planned = ChannelEnd(channel, coders, Meter(), copies=lambda: 1).plan(Microbatch("train", range(2))).nbytes
    assert frame_bytes((HIDDEN, MASK), codec_pair(expression), 0, name) == planned


def test_later_visits_of_aqsgd_are_as_long_as_its_codec_and_reuse_sends_values_only():
    def size(text, name):
        return frame_bytes((HIDDEN,), codec_pair(text), 0, name)

    assert size("aqsgd(q(4))/q(8)", "activations") == size("q(4)", "activations")
    kept = 2 * 6  # a tenth of each sample's 60
    assert size("topk(0.1)/reuse", "gradients") == 64 + 4 * kept


def test_a_boundary_of_its_own_has_frames_of_its_own():
    compression = CompressionOptions(
        activations="q(4)", gradients="q(4)", boundaries={1: BoundaryOptions(activations="q(8)")}
    )
    work = uniform("small", num_stages=3, num_microbatches=2, forward=1.0, backward=1.0, shape=(1, 8, 16))
    frames = work.frames("activations", compression, Network(bandwidth=8.0))
    assert [frame.on_wire for frame in frames] == [64 + 64 + 16, 64 + 128 + 16]
    assert label(compression) == "q(4), others at 1 boundary"


@pytest.mark.parametrize(("text", "said"), [("q(4)/q(8)", "q(4)/q(8)"), ("q(2)", "q(2)"), ("none / bf16", "none/bf16")])
def test_pairs_of_codecs_are_read_as_they_are_shown(text, said):
    assert label(codec_pair(text)) == said


def test_a_pair_that_cannot_be_is_told():
    with pytest.raises(OptionsError, match="aqsgd is for activations only"):
        codec_pair("aqsgd(q(4))")


def test_a_cut_for_two_stages_a_process_keeps_its_work():
    work = uniform("small", num_stages=2, num_microbatches=2, forward=1.0, backward=3.0, shape=(1, 8, 16))
    cut = work.cut_for("zbv-zero-bubble")
    assert (cut.forward, cut.backward, len(cut.boundaries)) == ((0.5,) * 4, (1.5,) * 4, 3)
    assert work.cut_for("gpipe") is work
