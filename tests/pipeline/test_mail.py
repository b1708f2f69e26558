"""The exchange of replicas that may be lost: a mean over those who take part, weighted by samples, alike in all."""

import gc
from functools import partial

import pytest
import torch

from support.exchanging import STEPS_PER_EPOCH, Replica, exchanged, gradients, make
from thinwire.compress import Progress
from thinwire.pipeline.errors import WireError
from thinwire.pipeline.options import ReplicaOptions
from thinwire.pipeline.replicas.layout import TILES
from thinwire.pipeline.replicas.member import Listener, never
from thinwire.pipeline.replicas.membership.mail import Mail, MailEnds, MailListener
from thinwire.pipeline.replicas.replica_passes import weights_of

SHAPES = {"matrix": (64, 80), "bias": (5,)}
SIZE = 5125


def present(expression):
    """Three replicas, each with mail of its own."""
    options, found = ReplicaOptions(count=3, gradients=expression), []
    for number in range(3):
        mail = Mail(number)
        member, links = partial(MailListener, mail=mail), MailEnds(mail, number, 2)
        found.append((Replica(number, options, links, SHAPES, never, layout=TILES, member=member), mail))
    return found


def meet(replicas, given, step, samples):
    """An exchange of those who have samples, by number; what each of them has after it, divided by the weights."""
    progress = Progress(step, STEPS_PER_EPOCH)
    frames = {}
    for number in samples:
        replica, mail = replicas[number]
        replica.set_gradients(given[number])
        replica.exchange.submit(number, progress)
        frames[number] = mail.collect()
    means = []
    for number in samples:
        replica, mail = replicas[number]
        mail.deliver(samples, {other: frames[other] for other in samples if other != number})
        replica.exchange.finish(progress)
        means.append(replica.flat / sum(mail.weights.values()))
    return means


def test_equal_replicas_count_alike():
    assert weights_of({0: 48, 1: 48, 2: 48}) == {0: 1, 1: 1, 2: 1}
    assert weights_of({0: 48, 2: 16}) == {0: 3, 2: 1}


def test_the_mean_is_weighted_by_samples():
    given = gradients(0, size=SIZE)
    first, second = meet(present("none"), given, 0, {0: 12, 2: 4})
    assert torch.equal(first, second)
    torch.testing.assert_close(first, (3 * given[0] + given[2]) / 4)


@pytest.mark.parametrize("expression", ["none", "ef(q(4))", 'ef(topk(0.1, values="means(2)", code="entropy"))'])
def test_those_present_hold_the_same_bits_whoever_is_there(expression):
    replicas = present(expression)
    for step, samples in enumerate([{0: 8, 1: 8, 2: 8}, {0: 8, 2: 8}, {1: 8, 2: 8}, {1: 8}, {0: 8, 1: 4, 2: 8}]):
        means = meet(replicas, gradients(step, size=SIZE), step, samples)
        assert all(torch.equal(mean, means[0]) for mean in means)
        # frames are as large as the model with `none`, and the next exchange is many steps away
        assert not any(frames for _, mail in replicas for frames in mail._arrived.values())


@pytest.mark.slow
def test_no_buffer_is_kept_until_the_next_exchange():
    """With `none` each lane kept one: so many times the weights of a stage as there are replicas, and once more."""

    def held():
        gc.collect()
        buffers = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype == torch.uint8]
        return sum({each.data_ptr(): each.untyped_storage().nbytes() for each in buffers}.values())

    replicas, before = present("none"), held()
    meet(replicas, gradients(0, size=SIZE), 0, {0: 8, 1: 8, 2: 8})
    assert held() - before < SIZE, "one frame has four times as many bytes"


def test_if_all_are_there_the_sum_is_that_of_replicas_that_cannot_be_lost():
    fixed = make("ef(q(4))", shapes=SHAPES, layout=TILES, member=Listener)
    elastic = present("ef(q(4))")
    for step in range(3):
        given = gradients(step, size=SIZE)
        sums = exchanged(fixed, given, step)
        means = meet(elastic, given, step, {0: 8, 1: 8, 2: 8})
        assert all(torch.equal(total / 3, mean) for total, mean in zip(sums, means, strict=True))


def test_a_frame_that_is_too_long_is_refused():
    [(replica, mail), *_] = present("none")
    replica.set_gradients(gradients(0, size=SIZE)[0])
    replica.exchange.submit(0, Progress(0, STEPS_PER_EPOCH))
    frames = [frame + bytes(1 << 16) for frame in mail.collect()]
    mail.deliver({0: 4, 1: 4}, {1: frames})
    with pytest.raises(WireError, match="a frame must have 1 to"):
        replica.exchange.finish(Progress(0, STEPS_PER_EPOCH))


@pytest.mark.parametrize(
    ("samples", "frames", "told"),
    [
        ({0: 4, 1: 4}, {1: []}, "0 of replica 1"),
        ({0: 4, 1: 4}, {1: [b"", b"", b""]}, "3 of replica 1"),
        ({0: 4, 1: 4}, {}, "none"),
        ({1: 4}, {1: [b""]}, "1 of replica 1"),
    ],
)
def test_frames_that_are_too_few_or_too_many_are_refused(samples, frames, told):
    """Another program with the keys may send them: the process that heard it ended with a traceback."""
    mail = Mail(0)
    mail.put(0, b"mine")
    with pytest.raises(WireError, match=rf"must bring 1 frames of each other one, got {told}"):
        mail.deliver(samples, frames)
