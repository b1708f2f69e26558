"""Indices: which are the largest, which are drawn, and the bytes of a set against its definition and its entropy."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.codec_helpers import FLOATING, assert_identical, few, gaussian
from support.pages import defined
from thinwire.compress import CodecError
from thinwire.compress.codecs import indices
from thinwire.compress.codecs.indices import (
    indices_size,
    largest,
    largest_magnitudes,
    magnitude_bits,
    pack_indices,
    random_indices,
    unpack_indices,
)
from thinwire.compress.codecs.selection import repetitive
from thinwire.compress.words import DeviceWords


@pytest.fixture(params=["numpy", "torch"])
def path(request, monkeypatch):
    """Either path, both on the CPU: NumPy's, and the one that other devices take."""
    take(request.param, monkeypatch)
    return request.param


def take(path, monkeypatch):
    if path == "torch":
        monkeypatch.setattr(indices, "_on_host", lambda x: False)


def subset(samples, n, k, seed=0):
    order = torch.rand(samples, n, generator=torch.Generator().manual_seed(seed)).argsort(1)
    return order[:, :k].sort(1).values + first_places(samples, n)


def first_places(samples, n):
    """Where each sample begins among the elements of all, as a column."""
    return torch.arange(samples)[:, None] * n


def packed(chosen, n, offset=0):
    size = indices_size(*chosen.shape[:1], n, chosen.shape[1])
    buffer = torch.full((offset + size + 8,), 0xA5, dtype=torch.uint8)
    pack_indices(chosen, n, buffer[offset : offset + size])
    assert (buffer[:offset] == 0xA5).all() and (buffer[offset + size :] == 0xA5).all(), "wrote outside the payload"
    return buffer[offset : offset + size]


def as_defined(places, total):
    """Both forms of a set, bit for bit as the module's first lines have them, and the shorter one."""
    members, places = set(places), min(places, sorted(set(range(total)) - set(places)), key=len)
    width = math.floor(math.log2(total / len(places)))

    def stream(bits):
        bits = bits + [0] * (-len(bits) % 8)
        return [sum(bit << j for j, bit in enumerate(bits[i : i + 8])) for i in range(0, len(bits), 8)]

    elias_fano = []
    for shift in range(0, width, 8):
        elias_fano += stream([p >> (shift + j) & 1 for p in places for j in range(min(8, width - shift))])
    high = [0] * (len(places) + ((total - 1) >> width))
    for i, p in enumerate(places):
        high[(p >> width) + i] = 1
    elias_fano += stream(high)
    bitmap = stream([int(p in members) for p in range(total)])
    return min(bitmap, elias_fano, key=len)


@pytest.mark.parametrize(
    ("chosen", "n", "payload"),
    [
        # a bitmap: 10110010 00
        ([[0, 2, 3, 6]], 10, "4d00"),
        # two samples in one bitmap: 1001 0110, shorter than a byte for each
        ([[0, 3], [5, 6]], 4, "69"),
        # w = 3; low bits 3, 0, 7 (c3 01) and high parts 0, 2, 3: bits 0, 3, 5 of 3 + 3
        ([[3, 16, 31]], 32, "c30129"),
        # w = 8; low bytes 05, ff and high parts 0, 1: bits 0, 2 of 2 + 1
        ([[5, 511]], 512, "05ff05"),
        # w = 9: low bytes ff, then bit 1; the high part 0: bit 0 of 1 + 1
        ([[511]], 1000, "ff0101"),
        # all of 32 but 3, 16 and 31
        ([[p for p in range(32) if p not in (3, 16, 31)]], 32, "c30129"),
        # everything
        ([[0, 1, 2], [3, 4, 5]], 3, ""),
    ],
)
def test_golden_bytes(path, chosen, n, payload):
    chosen = torch.tensor(chosen)
    encoded = packed(chosen, n)
    assert bytes(encoded.tolist()).hex() == payload
    assert_identical(unpack_indices(encoded, len(chosen), n, chosen.shape[1]), chosen)


@pytest.mark.slow
@few
@given(data=st.data(), samples=st.integers(1, 4), n=st.integers(1, 1200), offset=st.integers(0, 7))
def test_bytes_are_those_of_the_definition_and_come_back(data, samples, n, offset):
    k = data.draw(st.integers(1, n) | st.integers(1, min(n, 9)))
    chosen = subset(samples, n, k, seed=n)
    payload = packed(chosen, n, offset)
    assert payload.tolist() == ([] if k == n else as_defined(chosen.view(-1).tolist(), samples * n))
    assert_identical(unpack_indices(payload, samples, n, k), chosen)
    with pytest.MonkeyPatch.context() as monkeypatch:
        take("torch", monkeypatch)
        assert_identical(packed(chosen, n, offset), payload)
        assert_identical(unpack_indices(payload, samples, n, k), chosen)


@pytest.mark.parametrize("places", [range(50), range(950, 1000), range(0, 1000, 20), [0, 999]])
def test_sets_far_from_random_fit_as_well(path, places):
    chosen = torch.tensor([list(places)])
    assert_identical(unpack_indices(packed(chosen, 1000), 1, 1000, len(places)), chosen)


@pytest.mark.parametrize(("samples", "n", "k"), [(0, 5, 2), (3, 0, 0), (3, 4, 4), (1, 1, 1)])
def test_nothing_to_say_takes_no_bytes(samples, n, k):
    assert indices_size(samples, n, k) == 0
    chosen = torch.arange(samples * k).view(samples, k)
    assert_identical(unpack_indices(packed(chosen, n), samples, n, k), chosen)


@pytest.mark.parametrize(
    ("percent", "bits"),
    [
        (2, 7.56),
        (5, 6.25),
        (10, 5.25),
        (20, 4.25),
        (30, 3.33),
        (50, 2.00),
        (70, 1.43),
        (80, 1.06),
        (90, 0.58),
        (95, 0.33),
        (98, 0.154),
    ],
)
@pytest.mark.parametrize("samples", [1, 8])
def test_bits_for_each_position(percent, bits, samples):
    n = 98304
    k = round(n * percent / 100)
    actual = 8 * indices_size(samples, n, k) / (samples * k)
    assert abs(actual - bits) < 0.006, f"{actual:.4f} bits"
    assert actual <= 1.18 * entropy(n, k) / k, f"{actual * k / entropy(n, k):.3f} of the entropy"


@pytest.mark.parametrize("n", [4096, 98304, 64 * 1024 + 1])
def test_size_is_near_the_entropy_from_2_to_98_percent_and_never_below_what_a_set_can_take(n):
    shares = [k / n for k in range(n // 50 + 1, n - n // 50, n // 500)]
    ratios = [8 * indices_size(1, n, round(share * n)) / entropy(n, round(share * n)) for share in shares]
    assert max(ratios) <= 1.24, f"{max(ratios):.3f} at {shares[ratios.index(max(ratios))]:.1%}"
    for k in (1, 2, 30, *(round(share * n) for share in shares), n - 1):
        fewest = math.ceil(log2_binomial(n, k) / 8 - 1e-6)
        assert indices_size(1, n, k) >= fewest, f"{k} of {n} in fewer than {fewest} bytes"


def entropy(n, k):
    """Return n * H(k/n), in bits."""
    share = k / n
    return -n * (share * math.log2(share) + (1 - share) * math.log2(1 - share))


def log2_binomial(n, k):
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def test_a_payload_with_another_number_of_ones_is_noticed():
    payload = packed(subset(1, 100, 40), 100)
    payload[0] ^= 1
    with pytest.raises(CodecError, match="a payload must hold 40 indices, got 41"):
        unpack_indices(payload, 1, 100, 40)


def test_a_payload_that_lists_an_element_twice_is_noticed():
    """Of 100 elements 97 are sent. The payload lists the other three, here with one of them twice."""
    listing = packed(torch.tensor([[8, 9, 50]]), 100)  # 5 low bits each: 8 and 9 differ in the lowest
    listing[0] |= 1
    with pytest.raises(CodecError, match="a payload must hold 97 indices, got 98"):
        unpack_indices(listing, 1, 100, 97)


def first_by_sorting(magnitude, k):
    """The definition: by magnitude from the largest down, then by place."""
    rows = [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:k] for row in magnitude.tolist()]
    chosen = torch.tensor([sorted(row) for row in rows], dtype=torch.int64).view(len(magnitude), k)
    return chosen + first_places(*magnitude.shape)


@few
@given(
    data=st.data(),
    samples=st.integers(0, 4),
    n=st.integers(1, 80),
    top=st.sampled_from([0, 1, 3, 50, 2**31 - 1, 2**62]),
)
def test_largest_are_the_first_of_a_stable_sort(data, samples, n, top):
    k = data.draw(st.integers(0, n))
    dtype = torch.int64 if top > 2**31 else torch.int32
    generator = torch.Generator().manual_seed(n)
    magnitude = torch.randint(0, top + 1, (samples, n), generator=generator, dtype=torch.int64).to(dtype)
    expected = first_by_sorting(magnitude, k)
    assert_identical(largest(magnitude, k), expected)
    with pytest.MonkeyPatch.context() as monkeypatch:
        take("torch", monkeypatch)
        assert_identical(largest(magnitude, k), expected)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.3, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("k", [1, 400, 2000, 3999])
def test_largest_where_one_value_is_much_of_a_row(path, share, k):
    magnitude = magnitude_bits(gaussian(3, 4000))
    magnitude[:, torch.rand(4000, generator=torch.Generator().manual_seed(1)) < share] = 0
    magnitude[1] = magnitude[1].clamp(min=magnitude_bits(torch.tensor(0.7)).item())
    assert_identical(largest(magnitude, k), first_by_sorting(magnitude, k))


def long_rows():
    """Rows of which a sample tells little, or the wrong thing, about the rest."""
    n = 20_000
    gaussian_row, place = gaussian(1, n), torch.arange(n)
    sampled = place % (n // 2500 | 1) == 0
    return {
        "gaussian": gaussian_row,
        "bf16": gaussian_row.bfloat16(),
        "after a ReLU": gaussian_row.relu(),
        "mostly zeros": torch.where(place % 50 == 3, gaussian_row, 0.0),
        "constant": torch.full((1, n), -2.0),
        "ascending": place[None] / n,
        "large where sampled": torch.where(sampled, 100 + gaussian_row, gaussian_row),
        "small where sampled": torch.where(sampled, 0.0, gaussian_row),
        "NaN": torch.where(place % 3 == 0, torch.nan, gaussian_row),
    }


@pytest.mark.parametrize("row", long_rows())
@pytest.mark.parametrize("k", [1, 200, 2000, 15_000])
def test_long_rows_are_selected_as_sorted_ones(row, k):
    x = long_rows()[row]
    order = magnitude_bits(x).sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert_identical(largest_magnitudes(x, k), order.sort(1).values)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(("samples", "n"), [(1, 1), (3, 500), (5, 60_000), (2, 300_000)])
def test_largest_magnitudes_are_those_of_their_bits_in_any_number_of_blocks(path, dtype, samples, n):
    x = gaussian(samples, n).to(dtype)
    x[:, ::7], x[:, ::501], x[:, ::1001] = 2.0, math.nan, -math.inf
    before, k = x.clone(), n // 10 + 1
    assert_identical(largest_magnitudes(x, k), largest(magnitude_bits(x), k))
    assert_identical(x, before)
    order = magnitude_bits(x).sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert_identical(largest_magnitudes(x, k), order.sort(1).values + first_places(samples, n))
    assert_identical(largest_magnitudes(x.T.contiguous().T, k), largest_magnitudes(x, k))


def test_rows_that_are_mostly_one_value_are_told_from_others():
    """A million elements after a ReLU take NumPy's partition 30 to 100 ms; others take it less than one."""
    rows = magnitude_bits(gaussian(4, 30_000))
    assert not repetitive(rows.numpy())
    assert repetitive(magnitude_bits(gaussian(4, 30_000).relu()).numpy())
    assert repetitive(torch.zeros_like(rows).numpy())


@pytest.mark.parametrize("dtype", [*FLOATING, torch.float8_e4m3fn, torch.float8_e5m2])
def test_magnitude_bits_are_ordered_as_magnitudes_with_nan_the_largest(dtype):
    ascending = [0.0, 2.0**-9, 0.125, 1.0, 1.5, 2.0, 448.0]
    ascending += [] if dtype == torch.float8_e4m3fn else [math.inf]  # which has none
    ascending = torch.tensor([*ascending, math.nan]).to(dtype)
    bits = magnitude_bits(ascending)
    assert bits.dtype == (torch.int64 if dtype == torch.float64 else torch.int32)
    assert bits[0] == 0 and (bits.diff() > 0).all()
    negative = magnitude_bits((-ascending.float()).to(dtype))
    assert_identical(negative[:-1], bits[:-1])
    assert negative[-1] > bits[-2]


def test_magnitude_bits_of_a_tensor_with_strides():
    x = gaussian(6, 8)
    for view in (x.T, x[::2], x[:, 1::3], x[0].expand(4, 8)):
        assert_identical(magnitude_bits(view), magnitude_bits(view.contiguous()))


def words(seed):
    return DeviceWords(seed, torch.device("cpu"))


def test_random_indices_are_the_same_for_ever():
    assert random_indices(words(0), 2, 20, 5).tolist() == [[3, 4, 5, 6, 8], [20, 24, 37, 38, 39]]
    assert random_indices(words(2**64 - 1), 1, 7, 3).tolist() == [[4, 5, 6]]
    assert_identical(random_indices(words(5), 1, 6, 6), torch.arange(6)[None])


@few
@given(data=st.data(), samples=st.integers(0, 5), n=st.integers(0, 50), seed=st.integers(0, 2**64 - 1))
def test_random_indices_are_ascending_and_in_range(data, samples, n, seed):
    k = data.draw(st.integers(0, n))
    drawn = random_indices(words(seed), samples, n, k)
    assert drawn.shape == (samples, k) and drawn.dtype == torch.int64
    assert (drawn.diff(dim=1) > 0).all()
    within = drawn - first_places(samples, n)
    assert ((within >= 0) & (within < n)).all()


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_every_set_is_as_likely_as_any_other(k):
    draws = 30_000
    sets = dict.fromkeys(combinations(range(6), k), 0)
    for chosen in (random_indices(words(7), draws, 6, k) % 6).tolist():
        sets[tuple(chosen)] += 1
    expected = draws / len(sets)
    chi_square = sum((count - expected) ** 2 / expected for count in sets.values())
    freedom = len(sets) - 1
    deviation = (chi_square - freedom) / math.sqrt(2 * freedom)
    assert abs(deviation) < 4.5, f"{deviation:.1f} standard deviations"


def test_samples_and_seeds_draw_apart():
    drawn = random_indices(words(1), 50, 1000, 100) % 1000
    assert len({tuple(row) for row in drawn.tolist()}) == 50
    shared = np.mean([len(set(a) & set(b)) for a, b in combinations(drawn.tolist(), 2)])
    assert 9 < shared < 11, shared
    assert not torch.equal(drawn, random_indices(words(2), 50, 1000, 100) % 1000)


def test_the_reader_in_the_documentation_reads_what_is_written():
    read_indices = defined("read_indices")["read_indices"]
    for samples, n, k in (
        (2, 30, 30),
        (3, 40, 17),
        (3, 40, 33),
        (1, 4000, 3988),
        (2, 500, 41),
        (1, 4000, 12),
        (4, 70_000, 1),
    ):
        chosen = subset(samples, n, k)
        payload = bytes(packed(chosen, n).tolist())
        assert read_indices(payload, samples, n, k) == chosen.view(-1).tolist()
