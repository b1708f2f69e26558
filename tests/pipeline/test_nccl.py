from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from support.gpus import GPU, FakeGpu
from support.processes import run
from support.toy import WIDTH, Setting, train
from thinwire.compress import parse
from thinwire.pipeline.devices.transports import Location, advice, carrying
from thinwire.pipeline.errors import OptionsError, PipelineError
from thinwire.pipeline.frames import CHANNELS, HEADER_BYTES
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.processes.placement import Placement
from thinwire.pipeline.wire import nccl, wire
from thinwire.pipeline.wire.channel import frame_bytes

CPU_A, ONE, TWO, FAR = Location("a", None), Location("a", "GPU-1"), Location("a", "GPU-2"), Location("b", "GPU-3")


@pytest.mark.parametrize(
    ("wanted", "locations", "by", "why"),
    [
        ("gloo", (ONE, TWO), "gloo", "as wished"),
        ("auto", (ONE, TWO), "nccl", "two GPUs of one host"),
        ("auto", (ONE, ONE), "gloo", "they share a GPU"),
        ("auto", (ONE, FAR), "gloo", "two hosts"),
        ("auto", (ONE, CPU_A), "gloo", "process 1 computes on the CPU"),
        ("auto", (CPU_A, CPU_A), "gloo", "process 0 computes on the CPU"),
        ("nccl", (ONE, TWO), "nccl", "as wished"),
        ("nccl", (ONE, FAR), "nccl", "as wished"),
    ],
)
def test_nccl_is_for_two_gpus_of_a_host_unless_wished_for(wanted, locations, by, why):
    assert carrying(wanted, (0, 1), locations) == (by, why)


@pytest.mark.parametrize(
    ("locations", "said"),
    [
        ((ONE, CPU_A), "needs a GPU in every process, and process 1 computes on the CPU; add --training.device cuda"),
        ((ONE, ONE), "processes 0 and 1 share one of a; start fewer processes there, or add --wire.transport gloo"),
    ],
)
def test_a_wish_for_nccl_that_cannot_be_is_one_sentence(locations, said):
    with pytest.raises(OptionsError) as refused:
        carrying("nccl", (0, 1), locations)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_processes_on_one_gpu_may_say_that_they_are_on_two_hosts(monkeypatch):
    monkeypatch.setenv("NCCL_HOSTID", "another")
    assert Location.of(torch.device("cpu")) == Location("another", None)


@pytest.mark.parametrize(
    ("gpus", "said"),
    [(0, "gloo for each pair: there is no GPU"), (1, "processes share the GPU"), (4, "nccl on two of the 4 GPUs")],
)
def test_the_doctor_says_what_each_pair_would_use(gpus, said):
    assert said in advice(gpus)


def test_without_a_wish_no_process_is_asked():
    assert nccl.connect("gloo", Placement({0: 0, 1: 1}), torch.device("cpu"), None) == nccl.GpuLinks()


def meeting_first(operation):
    """As NCCL does: the first message of a communicator makes its connection, and the sender waits for the receiver."""

    def operate(tensor, *, group, **peer):
        work = operation(tensor, group=group, **peer)
        if group not in met:
            met.add(group)
            other = 1 - dist.get_group_rank(group, dist.get_rank())
            if operation is dist.isend:
                dist.recv(torch.empty(1), group=group, group_src=other)
            else:
                dist.send(torch.empty(1), group=group, group_dst=other)
        return work

    met = set()
    return operate


def from_gpu_to_gpu(rank, options, damaged=False):
    """Train with the ends of NCCL; gloo carries their messages, which are tensors of the CPU."""
    made, receive = wire.Wire.__init__, nccl.GpuArrivals.receive
    locations = iter([Location("a", f"GPU-{rank}")])

    def received(self, what):
        frame = receive(self, what)
        if damaged and what.startswith("stage 1 was waiting for activations of micro-batch 2, train pass 1"):
            frame[100] ^= 1
        return frame

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl.GpuArrivals, "receive", received)
        patch.setattr(nccl, "BACKEND", "gloo")
        ends = SimpleNamespace(**vars(dist))
        ends.isend, ends.irecv = meeting_first(dist.isend), meeting_first(dist.irecv)
        patch.setattr(nccl, "dist", ends)
        patch.setattr(nccl.Location, "of", lambda device: next(locations))

        def with_links(self, *arguments, **more):
            made(self, *arguments, **more)
            where = Setting(**options).placement(rank)
            self.maker.gpus = nccl.connect("auto", where, torch.device("cpu"), wire.timedelta(seconds=20))

        patch.setattr(wire.Wire, "__init__", with_links)
        try:
            return train(rank, options)
        except PipelineError as error:
            return str(error)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("schedule", "processes", "stages", "codecs"),
    [
        ("1f1b", 2, 2, ("aqsgd(q(4))", "ef(topk(0.25))")),
        ("1f1b", 3, 3, ("q(4)", "q(8)")),
        ("interleaved-zero-bubble", 2, 4, ("q(4)", "q(8)")),
        ("1f1b", 2, 2, ("q(8, step=0.2)", "q(8, step=0.2)")),
        ("1f1b", 2, 2, ("q(8, step=0.2, codebook=4)", 'q(16, step=1.0, per="tensor")')),
        ("1f1b", 2, 2, ('aqsgd(q(8, step=0.5), first=q(8, code="entropy"))', 'ef(topk(0.3, code="entropy"))')),
    ],
    ids=[
        "with feedback",
        "three processes",
        "several boundaries between two processes",
        "the default",
        "of pretrained",
        "coded",
    ],
)
def test_the_ends_from_gpu_to_gpu_carry_the_same_numbers(alone, schedule, processes, stages, codecs):
    """With three processes it hung: torch names a group by how many there are, and each made those of its own pairs.

    With several boundaries between two processes, the frames of one came where those of another were wanted. And with
    interleaved-zero-bubble each of the two waited until the other would receive its first frame.
    """
    compression = dict(zip(("activations", "gradients"), codecs, strict=True))
    options = {"schedule": schedule, "num_stages": stages, "compression": compression}
    results = run(from_gpu_to_gpu, processes, options)
    assert not [said for said in results if isinstance(said, str)]
    losses, weights, coded, *_ = train(0, options | {"simulated": True})
    assert next(found[0] for found in results if found[0] is not None) == losses
    for found in results:
        for stage, state in found[1].items():
            assert all(torch.equal(tensor, weights[stage][name]) for name, tensor in state.items())
        for stage, sent in found[2].items():
            assert sent and sent.keys() == coded[stage].keys()
            for route, traffic in sent.items():
                _, channel, _ = route
                known = parse(dict(zip(("activations", "gradients"), codecs, strict=True))[channel]).of_known_length()
                if known.feedback is None:
                    length = frame_bytes([known.nbytes((2, 3, WIDTH), torch.float32)])
                    assert traffic.bytes == traffic.frames * length, "what was really sent"


@pytest.mark.processes
def test_a_payload_that_is_damaged_between_gpus_is_told_before_the_optimizer_moves():
    options = {"schedule": "1f1b", "compression": {"activations": "q(4)", "gradients": "q(8)"}}
    options["wire"] = {"timeout": 8.0}  # for which the other one waits in vain
    _, said = run(from_gpu_to_gpu, 2, options, True)
    assert said == (
        "stage 1 received from stage 0, as activations of micro-batch 2, train pass 1, over boundary 0: the payloads "
        "do not match their sum: the frame was damaged on the way"
    )


def test_a_sum_changes_with_every_byte_and_with_the_order_of_words():
    frame = torch.randint(0, 256, (200,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    for nbytes in (HEADER_BYTES, HEADER_BYTES + 1, 150, 152):
        sums = nccl.PayloadSums(150 + 2, torch.device("cpu"))
        sealed = frame.clone()
        sums.seal(sealed, nbytes)
        assert torch.equal(sealed[:nbytes], frame[:nbytes]) and sums.compared(sealed, nbytes)
        for place in range(HEADER_BYTES, nccl.sealed_bytes(nbytes)):
            for bit in (1, 128):
                sealed[place] ^= bit
                assert not sums.compared(sealed, nbytes), f"byte {place}"
                sealed[place] ^= bit
    swapped = sealed.clone()
    swapped[64:68], swapped[68:72] = sealed[68:72], sealed[64:68]
    assert not sums.compared(swapped, nbytes)


def test_a_sum_by_parts_is_that_of_the_whole_and_makes_nothing_larger_than_a_part(monkeypatch):
    frame = torch.randint(0, 256, (1000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    whole = nccl.PayloadSums(900, torch.device("cpu")).of(frame, 900)
    words = frame[HEADER_BYTES : nccl.sealed_bytes(900) - 8].view(torch.int32).long()
    assert whole == (words * (2 * torch.arange(len(words)) + 1)).sum()
    monkeypatch.setattr(nccl, "PART", 7)
    sums = nccl.PayloadSums(900, torch.device("cpu"))
    assert len(sums._factors) == 7
    assert torch.equal(sums.of(frame, 900), whole)


def test_a_sum_is_ordered_on_the_gpu_without_a_look_at_it():
    with FakeGpu():
        sums = nccl.PayloadSums(150, GPU)
        frame = torch.empty(nccl.sealed_bytes(150), dtype=torch.uint8, device=GPU)
        sums.seal(frame, 140)
        assert sums.compared(frame, 140).device == GPU


@pytest.mark.processes
def test_frames_whose_length_varies_in_any_case_are_refused_from_gpu_to_gpu():
    options = {"compression": {"activations": 'rotated.Rotated("q(8, step=0.2)")', "gradients": "q(8)"}}
    assert all(
        "needs frames whose length is known in advance" in said and "add --wire.transport gloo" in said
        for said in run(from_gpu_to_gpu, 2, options)
    )


@pytest.mark.processes
def test_a_line_says_which_codecs_go_uncoded_from_gpu_to_gpu():
    first, _ = run(notes_of, 2)
    assert first[-1] == (
        'q(8, step=0.2, codebook=4096) goes over NCCL as q(8, step=0.2, codebook=4096, code="plain"), because frames '
        "have a length known in advance there: the same losses and weights, and more bytes"
    )
    assert len(first) == 2, "q(8) goes as it is"


def notes_of(rank):
    made = wire.Wire(CompressionOptions(gradients="q(8)"))
    before = made.notes
    made.maker.gpus = nccl.GpuLinks({(0, name): made.group for name in CHANNELS}, ["nccl carries"])
    assert before == []
    return made.notes
