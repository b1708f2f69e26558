"""The option code="entropy": the same values in fewer bytes, never more than planned, and no harm from wrong bytes."""

import math

import pytest
import torch

from support.codec_contract import assert_contract, documented
from support.codec_helpers import KEY, assert_identical, encode, entropy, gaussian, roundtrip
from thinwire.compress import CodecError, parse
from thinwire.compress.codecs.coding.bits import unpack
from thinwire.compress.codecs.coding.gaps import unpack_gaps
from thinwire.compress.codecs.coding.integers import encode_integers
from thinwire.compress.codecs.coding.lengths import put_length
from thinwire.compress.codecs.coding.symbols import decode_symbols, encode_symbols
from thinwire.compress.codecs.fused import steps
from thinwire.compress.codecs.granularity import blocks_per
from thinwire.compress.codecs.indices import indices_size
from thinwire.compress.codecs.quantize import Quantize
from thinwire.compress.codecs.sparse import TopK

CODED = [f'q({bits}, code="entropy")' for bits in range(1, 9)]
CODED += [
    'normal.Normal(3, code="entropy")',
    'fp8(code="entropy")',
    'q(2, per="channel", code="entropy")',
]
CODED += ['topk(0.1, code="entropy")', 'topk(0.7, code="entropy")', 'topk(0.01, values="q(8)", code="entropy")']
CODED += ['q(3, scale="minmax", group=5, code="entropy")']


def plain(expression):
    return parse(expression.replace('(code="entropy")', "").replace(', code="entropy"', ""))


@pytest.mark.parametrize("expression", CODED)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (33, 257)])
def test_values_are_those_without_the_option(expression, shape):
    x, codec = gaussian(*shape), parse(expression)
    assert str(codec) == expression
    assert codec.nbytes(x.shape, x.dtype) == plain(expression).nbytes(x.shape, x.dtype) + 4
    assert_identical(assert_contract(codec, x, offset=3), roundtrip(plain(expression), x))


@pytest.mark.parametrize("expression", CODED)
def test_nothing_beyond_the_used_bytes_is_read(expression):
    x, codec = gaussian(40, 512), parse(expression)
    payload = encode(codec, x)
    decoded, used = roundtrip(codec, x), codec.used(payload)
    payload[used:] = 0xA5
    again = torch.empty_like(x)
    codec.decode(payload, again, KEY)
    assert_identical(again, decoded)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_a_payload_is_near_its_entropy(bits):
    x, codec = gaussian(128, 1024), Quantize(bits, code="entropy")
    payload = encode(codec, x)
    bound = 4 + 2 * len(x) + entropy(unpack(encode(Quantize(bits), x)[2 * len(x) :], bits, x.numel())) / 8
    assert bound <= codec.used(payload) <= 1.03 * bound, codec.used(payload) / bound
    assert codec.used(payload) < 0.95 * len(payload)


@pytest.mark.parametrize("percent", [0.1, 1, 2, 5, 10, 20, 30, 50, 80, 95])
def test_positions_take_little_more_than_their_entropy(percent):
    x = gaussian(4, 98304)
    k = round(percent / 100 * 98304)
    codec = TopK(percent / 100, code="entropy")
    share = k / 98304
    bound = -4 * 98304 * (share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8
    used = codec.used(encode(codec, x)) - 4 - 4 * 4 * k
    assert bound * 0.99 < used < 1.02 * bound + 120, used / bound


def test_positions_in_clusters_and_far_apart():
    x = torch.zeros(1, 300_000)
    x[0, 1000:11_000], x[0, 299_990:] = 1.0, 2.0
    codec = TopK(10_010 / 300_000, code="entropy")
    assert_identical(roundtrip(codec, x), x)
    assert codec.used(encode(codec, x)) - 4 - 4 * 10_010 < 0.5 * indices_size(1, 300_000, 10_010)


def test_codes_that_are_all_as_frequent_take_four_bytes_more():
    x = torch.linspace(-1, 1, 4096)[torch.randperm(4096, generator=torch.Generator().manual_seed(0))].view(1, -1)
    payload = encode(Quantize(8, code="entropy"), x)
    assert Quantize(8, code="entropy").used(payload) == len(payload) == len(encode(Quantize(8), x)) + 4


def test_a_codec_without_the_option_uses_all_bytes():
    for expression in ("none", "q(4)", "topk(0.1)"):
        codec = parse(expression)
        assert not codec.varies and codec.used(encode(codec, gaussian(4, 8))) == codec.nbytes((4, 8), torch.float32)
    assert parse("aqsgd(q(4))").inner.varies is False and parse('aqsgd(q(4, code="entropy"))').inner.varies


@pytest.mark.parametrize("expression", CODED)
def test_the_form_of_known_length_is_decoded_to_the_same_values(expression):
    codec = parse(expression)
    known = codec.of_known_length()
    assert codec.varies and not known.varies
    assert_identical(roundtrip(known, gaussian(30, 50)), roundtrip(codec, gaussian(30, 50)))


def test_feedback_has_a_form_of_known_length_around_the_codecs_inside():
    method = parse('aqsgd(q(4, code="entropy"), first=q(8, step=0.2), slot="sample")')
    assert method.of_known_length() == parse('aqsgd(q(4), first=q(8, step=0.2, code="plain"), slot="sample")')
    assert parse("ef(q(4))").of_known_length() == parse("ef(q(4))")


@pytest.mark.parametrize("expression", CODED)
@pytest.mark.parametrize("seed", range(3))
def test_damage_is_a_sentence(expression, seed):
    codec, x = parse(expression), gaussian(16, 64)
    payload, out = encode(codec, x), torch.empty_like(x)
    noise = torch.randint(0, 256, (len(payload),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    for damaged in (noise, torch.cat([payload[:4], noise[4:]]), torch.zeros_like(payload)):
        try:
            codec.decode(damaged, out, KEY)
        except CodecError as error:
            assert "payload" in str(error)


@pytest.mark.parametrize("expression", ['topk(1.0, code="entropy")', 'topk(0.9, per="row", code="entropy")'])
def test_indices_of_all_elements_are_not_coded(expression):
    codec = parse(expression)
    payload = encode(codec, gaussian(5, 4))
    put_length(len(payload) - 1, payload)
    with pytest.raises(CodecError, match="a payload must not code the indices of all 20 elements"):
        codec.decode(payload, torch.empty(5, 4), KEY)


@pytest.mark.parametrize("last", [249, 255])
def test_gaps_that_would_be_below_zero_are_refused(last):
    symbols = torch.tensor([3, last], dtype=torch.uint8)
    low = torch.full(((last // 4 + 6) // 8,), 0xFF, dtype=torch.uint8)
    with pytest.raises(CodecError, match=r"gaps among 1000 elements must have at most 10 low bits, got 6[12]"):
        unpack_gaps(torch.cat([encode_symbols(symbols), low]), 1, 1000, 2)


def test_a_length_beyond_the_payload_is_refused():
    payload = encode('q(4, code="entropy")', gaussian(8, 64))
    payload[3] = 1
    with pytest.raises(CodecError, match=f"a payload's length must be from 4 to {len(payload)}, got 16777"):
        parse('q(4, code="entropy")').used(payload)


@pytest.mark.parametrize(
    "expression",
    ['q(8, code="entropy")', 'topk(1, code="entropy")'],
)
def test_a_tensor_whose_length_takes_more_than_four_bytes_is_refused(expression):
    codec = parse(expression)
    assert codec.nbytes((1 << 12, 1 << 10), torch.float32) > 4
    with pytest.raises(
        CodecError, match=r'may have 4294967295 bytes, got \d+; drop code="entropy", or send fewer rows'
    ):
        codec.nbytes((1 << 16, 1 << 17), torch.float32)


def differences(rows, width):
    """Columns of many sizes, as the differences of AQ-SGD have them."""
    return gaussian(rows, width) * torch.logspace(-2, 0, width)


FORMS = {0: (differences, 'q(4, code="entropy")'), 1: (lambda *shape: gaussian(*shape).relu(), 'q(4, code="entropy")')}


def coded_of(form, rows=16, width=2000):
    """A codec, a tensor, its payload, and where the form is."""
    make, expression = FORMS[form]
    codec, x = parse(expression), make(rows, width)
    payload, at = encode(codec, x), 4 + 2 * rows
    assert payload[at] == form and codec.used(payload) < len(payload)
    return codec, x, payload, at


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_shorter_one_where_it_is_taken(form):
    codec, x, payload, at = coded_of(form)
    codes = unpack(codec._complete.plain(payload, x.shape)[2 * len(x) :], 4, x.numel())
    by_table = len(encode_symbols(codes))
    by_classes = sum(map(len, encode_integers(codes.to(torch.int16) - 8, blocks_per("channel", x.shape))))
    taken = codec.used(payload) - at - 1
    assert taken == (by_classes, by_table)[form] < 0.9 * (by_table, by_classes)[form]


def test_kernels_and_torch_operations_code_symbols_alike(monkeypatch):
    symbols = [(gaussian(n, scale=9.0) + 128).clamp(0, 255).to(torch.uint8) for n in (1, 7, 1025, 70_000)]
    by_kernels = [encode_symbols(each) for each in symbols]
    monkeypatch.setattr(steps, "cover_code", lambda x: False)
    for some, coded in zip(symbols, by_kernels, strict=True):
        assert_identical(encode_symbols(some), coded)
        assert_identical(decode_symbols(torch.cat([coded, coded[:3]]), len(some))[0], some)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", [True, False])
def test_codes_that_no_encoder_writes_are_refused(monkeypatch, form, kernels):
    codec, x, payload, at = coded_of(form)
    if not kernels:
        monkeypatch.setattr(steps, "cover_code", lambda x: False)
    stop = codec.used(payload)

    def refused(sentence, length=stop, **changes):
        damaged = payload.clone()
        for place, value in changes.items():
            damaged[at + int(place.removeprefix("at"))] = value
        put_length(length, damaged)
        with pytest.raises(CodecError, match=sentence):
            codec.decode(damaged, torch.empty_like(x), KEY)

    refused("a payload's form must be 0 or 1, got 2", at0=2)
    refused("a payload's form must be 0 or 1, got -1", length=at)
    refused("a payload's (coded symbols|escapes)", length=stop - 3)
    if form:
        refused("a payload's frequencies must be parts of 4096, got ", at3=payload[at + 3] ^ 1)
        refused("a payload's coded symbols need 513 bytes here, and", length=at + 40, at1=255)
        refused("must end with its coded symbols, and 1 bytes more are there", length=stop + 1)


def test_codes_beyond_their_bits_are_refused():
    codec, x = parse('q(2, code="entropy")'), differences(64, 500)
    payload, start = encode(codec, x), 4 + 2 * 64
    coded = encode_symbols(torch.full((x.numel(),), 4, dtype=torch.uint8))
    payload[start], payload[start + 1 : start + 1 + len(coded)] = 1, coded
    put_length(start + 1 + len(coded), payload)
    with pytest.raises(CodecError, match="a payload's codes must have 2 bits, got codes from 4 to 4"):
        codec.decode(payload, torch.empty_like(x), KEY)


@pytest.mark.parametrize("form", FORMS)
def test_the_decoder_in_the_documentation_gets_the_same_bytes(form):
    _, x, payload, _ = coded_of(form, 16, 256)
    uncoded = documented("uncoded", "read_integers")
    assert uncoded(bytes(payload.tolist()), 4, 16, 256, 2 * 16) == bytes(encode("q(4)", x).tolist())


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.7])
def test_the_reader_of_positions_in_the_documentation_reads_what_is_written(fraction):
    x, codec, n = gaussian(3, 30_000), TopK(fraction, code="entropy"), 30_000
    x[:, 100:4000] = 0  # one long gap in each row
    k, payload = codec.count(n), encode(codec, x)
    start, length = 4 + 4 * 3 * k, codec.used(payload)
    assert length < len(payload), "coded"
    found = documented("read_gaps", "uncoded", "read_integers")(bytes(payload[start:length].tolist()), 3, n, k)
    assert found == codec.indices(payload, x.shape, x.dtype, KEY).flatten().tolist()


def test_an_unknown_code_is_answered_with_the_known_one():
    with pytest.raises(CodecError, match='q\'s code must be one of "entropy", got "huffman"'):
        Quantize(4, code="huffman")
