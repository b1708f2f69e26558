"""The sum of gradients through codecs: errors at both sides, equal replicas, and errors by the names of parameters."""

import pytest
import torch

from support.exchanging import REPLICAS, SHAPES, SIZE, exchanged, gradients, make, simulated, take_turns
from thinwire.compress import Key, parse
from thinwire.pipeline.errors import CheckpointError, OptionsError
from thinwire.pipeline.options import CompressionOptions, ReplicaOptions
from thinwire.pipeline.replicas.layout import FLAT, TILES

ROW = FLAT.row


@pytest.mark.parametrize("layout", [FLAT, TILES])
@pytest.mark.parametrize("to_all", [False, True])
def test_without_compression_it_is_the_sum_in_the_order_of_the_replicas(layout, to_all):
    given = gradients(0)
    for flat in exchanged(make("none", layout=layout, to_all=to_all), given, 0):
        assert torch.equal(flat, given[0] + given[1] + given[2])


@pytest.mark.parametrize("layout", [FLAT, TILES])
@pytest.mark.parametrize("method", ["none", "ef(q(4))"])
def test_torchs_default_dtype_does_not_matter(method, layout):
    given = [gradients(step) for step in range(2)]

    def after_two_steps():
        replicas = make(method, layout=layout)
        return [exchanged(replicas, flat, step) for step, flat in enumerate(given)][-1]

    wanted = after_two_steps()
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = after_two_steps()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other)


CODECS = ["q(4)", 'q(2, scale="minmax", round="stochastic")', "topk(0.05)"]


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["bf16", *(f"ef({codec})" for codec in CODECS), "efmixed(topk(0.1))"])
def test_replicas_stay_equal_and_lose_nothing_for_good(expression):
    replicas = make(expression)
    used = torch.zeros(SIZE, dtype=torch.float64)
    wanted = torch.zeros(SIZE, dtype=torch.float64)
    first_error = None
    for step in range(40):
        given = gradients(step % 5)
        mine, *others = exchanged(replicas, given, step)
        assert all(torch.equal(mine, other) for other in others), step
        used, wanted = used + mine, wanted + given.double().sum(0)
        error = float((used - wanted).norm() / wanted.norm())
        first_error = first_error or error
    if "ef" in expression:
        assert error < first_error / 4  # what is sent adds up: the errors are bounded, the sums grow
    assert first_error > 1e-4, "the codec does nothing"


OTHERS = [
    *("none", "bf16", "fp16", "fp8", "q(1)", "q(8)", "randk(0.1)"),
    *(
        'q(4, grid="midtread")',
        'q(4, code="entropy")',
        "short_scales.ByteScales(4, group=64)",
    ),
    *('topk(0.1, values="q(8)")', 'topk(0.015625, values="means(2)", code="entropy")'),
]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("codec", OTHERS)
def test_replicas_stay_equal_with_any_codec(codec, count):
    """Of four replicas the last one owns one row, and that is ragged."""
    replicas = make(codec if codec in ("none", "bf16", "fp16") else f"ef({codec})", count)
    for step in range(15):
        given = gradients(step % 5, count)
        mine, *others = exchanged(replicas, given, step)
        assert all(torch.equal(mine, other) for other in others), step
    assert mine.isfinite().all() and mine.any()
    exact = torch.allclose(mine, given.sum(0), rtol=1e-5, atol=1e-5)
    assert exact == (codec == "none"), "a codec that loses nothing does nothing"


def coded(codec, rows):
    """C(rows), for a codec that draws nothing."""
    key, payload = Key(0, 0, "", "train", 0, 0), torch.empty(codec.nbytes(rows.shape, rows.dtype), dtype=torch.uint8)
    out = torch.empty_like(rows)
    codec.encode(rows, payload, key)
    codec.decode(payload, out, key)
    return out


def test_it_is_the_published_arithmetic_with_errors_at_workers_and_owners():
    """u = g + e; C(u) to the owners; v = E + sum of C(u); C(v) to all."""
    codec, replicas = parse("q(4)"), make("ef(q(4))")
    worker, owner = torch.zeros(REPLICAS, 7, ROW), torch.zeros(7, ROW)
    for step in range(5):
        given = torch.nn.functional.pad(gradients(step), (0, 7 * ROW - SIZE)).view(REPLICAS, 7, ROW)
        u = given + worker
        sent = torch.stack([coded(codec, rows) for rows in u])  # q has a scale for each row, so parts do not matter
        worker = u - sent
        v = owner + (sent[0] + sent[1] + sent[2])
        mean = coded(codec, v)
        owner = v - mean
        for flat in exchanged(replicas, gradients(step), step):
            torch.testing.assert_close(flat, mean.flatten()[:SIZE], rtol=1e-6, atol=1e-6)


def test_errors_go_on_by_the_names_of_parameters():
    replicas, again = make("ef(topk(0.05))"), make("ef(topk(0.05))")
    for step in range(3):
        exchanged(replicas, gradients(step), step)
    for number, (replica, other) in enumerate(zip(replicas, again, strict=True)):
        saved = replica.exchange.state_dict()
        whole = {name for name in saved if name.startswith(f"worker/{number}/")}
        assert {name.split("/")[2] for name in whole} == {*SHAPES, "padding"}
        assert sum(len(saved[name]) for name in whole) == 7 * ROW
        other.exchange.load_state_dict(saved)
    assert sum(len(saved) for r in replicas for n, saved in r.exchange.state_dict().items() if "owner" in n) == 7 * ROW
    for ours, theirs in zip(exchanged(replicas, gradients(3), 3), exchanged(again, gradients(3), 3), strict=True):
        assert torch.equal(ours, theirs)
    fresh = exchanged(make("ef(topk(0.05))"), gradients(3), 3)
    assert not torch.equal(fresh[0], ours)


@pytest.mark.parametrize("to_all", [False, True])
@pytest.mark.parametrize("expression", ['ef(q(2, round="stochastic"))', "ef(topk(0.02))"])
def test_replicas_that_exchange_tiles_stay_equal_and_go_on_by_name(to_all, expression):
    replicas, again = (make(expression, layout=TILES, to_all=to_all) for _ in range(2))
    for step in range(4):
        mine, *others = exchanged(replicas, gradients(step), step)
        assert all(torch.equal(mine, other) for other in others)
    for replica, other in zip(replicas, again, strict=True):
        other.exchange.load_state_dict(replica.exchange.state_dict())
    for ours, theirs in zip(exchanged(replicas, gradients(4), 4), exchanged(again, gradients(4), 4), strict=True):
        assert torch.equal(ours, theirs)


def test_if_all_add_up_each_sends_all_to_every_other():
    """u = d + e; C(u) to all; e <- u - C(u); everyone adds up C(u) in the order of the replicas."""
    codec, replicas = parse("q(4)"), make("ef(q(4))", layout=TILES, to_all=True)
    errors = torch.zeros(REPLICAS, 1, 4096)
    for step in range(3):
        u = torch.nn.functional.pad(gradients(step), (0, 4096 - SIZE)).view(REPLICAS, 1, 4096) + errors
        sent = torch.stack([coded(codec, rows) for rows in u])
        errors = u - sent
        total = (sent[0] + sent[1] + sent[2]).flatten()[:SIZE]
        for flat in exchanged(replicas, gradients(step), step):
            assert torch.equal(flat, total)
    carried = replicas[0].meter.sent
    assert carried.keys() == {(1, "parts", "train")}
    # 2048 bytes of codes and a scale of 2, to each of two others
    assert carried[1, "parts", "train"].bytes == 3 * 2 * (64 + 2050)


UNUSED = ("bias", "wide")


@pytest.mark.parametrize("expression", ["none", "ef(q(4))"])
def test_a_parameter_has_a_gradient_once_a_replica_has_used_it(expression):
    """q(4) makes half a step of each zero, in a row that two parameters share; that is no gradient."""
    stage = simulated(expression)
    for step, (unused, found) in enumerate([((UNUSED, UNUSED), False), ((UNUSED, ()), True), ((UNUSED, UNUSED), True)]):
        after = take_turns(stage, gradients(step, 2), step, unused)
        assert [after[name] is not None for name in SHAPES] == [found, found, True], step


def test_a_parameter_that_a_replica_in_another_process_used_has_a_gradient():
    stage = simulated("none", everyone=lambda mine: [mine, [False, True, False]])
    after = take_turns(stage, gradients(0, 2), 0, (UNUSED, UNUSED))
    assert after["wide"] is None and not after["bias"].any()


def test_what_replicas_have_used_goes_on():
    """A parameter that some steps use has a gradient in all steps from its first one on, after a stop too."""
    stage, again = simulated("ef(q(4))"), simulated("ef(q(4))")
    take_turns(stage, gradients(0, 2), 0)
    saved = stage.exchange.state_dict()
    again.exchange.load_state_dict(saved)
    ours, theirs = (take_turns(each, gradients(1, 2), 1, (UNUSED, UNUSED)) for each in (stage, again))
    assert all(torch.equal(theirs[name], mine) for name, mine in ours.items())
    with pytest.raises(CheckpointError, match="does not say which parameters of this stage its replicas have used"):
        again.exchange.load_state_dict({name: tensor for name, tensor in saved.items() if "used" not in name})


def test_four_bits_are_four_bits():
    replicas = make("ef(q(4))")
    exchanged(replicas, gradients(0), 0)
    # each row: 256 bytes of codes and a scale of 2; a frame for each owner but oneself, and a sum to each other
    sent = [replica.meter.sent[1, "parts", "train"] for replica in replicas]
    assert [each.bytes for each in sent] == [2 * 64 + rows * 258 for rows in (4, 5, 5)]
    sums = [replica.meter.sent[1, "sums", "train"] for replica in replicas]
    assert [each.bytes for each in sums] == [2 * (64 + rows * 258) for rows in (3, 2, 2)]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("reuse", "reuse needs the indices of an activation"),
        ('ef(q(4), slot="sample")', "keeps a buffer for each sample, and a gradient is the sum over many; drop slot"),
        ("ef21(q(4))", "keeps a buffer at both ends, and sums of gradients keep errors at the sender; use ef"),
        ("aqsgd(q(4))", "aqsgd(q(4)) keeps a buffer at both ends, and sums of gradients keep errors at the sender"),
        ('ef(q(4), store="disk")', "must keep its buffers in memory for sums of gradients; drop store"),
        ("ef(q(4), store_bits=8)", "must keep errors of sums in 32 or 16 bits, got store_bits=8"),
        ("q(99)", "q's bits must be an integer from 1 to 8, got 99"),
    ],
)
def test_what_cannot_carry_gradients_is_refused(expression, said):
    with pytest.raises(OptionsError) as caught:
        ReplicaOptions(count=2, gradients=expression)
    assert all(mistake.startswith("replicas.gradients: ") for mistake in caught.value.mistakes)
    assert said in str(caught.value)
    with pytest.raises(OptionsError) as shared:
        CompressionOptions(shared=expression)
    assert [mistake.replace("compression.shared", "replicas.gradients") for mistake in shared.value.mistakes] == list(
        caught.value.mistakes
    )
