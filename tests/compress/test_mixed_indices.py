"""Mixed indices: EF-mixed's choice, against its definition."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.codec_helpers import FLOATING, few, gaussian
from thinwire.compress.codecs import indices
from thinwire.compress.codecs.sparse import mixed_indices


def mixed_by_definition(x, error, k):
    """EF-mixed's indices of one sample, in the words of its definition."""

    def first(values, places, count):
        return sorted(places, key=lambda i: (-values[i], i))[:count]

    everywhere = range(len(x))
    magnitude, lost = [abs(v) for v in x], [abs(v) for v in error]
    both = [abs(a + b) for a, b in zip(x, error, strict=True)]
    chosen = {*first(magnitude, everywhere, math.ceil(k / 2)), *first(lost, everywhere, k // 2)}
    return sorted(chosen | set(first(both, [i for i in everywhere if i not in chosen], k - len(chosen))))


@few
@given(
    data=st.data(),
    samples=st.integers(1, 3),
    n=st.integers(1, 40),
    levels=st.sampled_from([1, 3, 1000]),
    dtype=st.sampled_from(FLOATING),
    path=st.sampled_from(["numpy", "torch"]),
)
def test_mixed_indices_are_those_of_the_definition(data, samples, n, levels, dtype, path):
    k = data.draw(st.integers(1, n))
    x = gaussian(samples, n, seed=n).mul(levels).round().to(dtype)
    error = gaussian(samples, n, seed=n + 1).mul(levels).round().to(dtype)
    rows = enumerate(zip(x.tolist(), error.tolist(), strict=True))
    expected = [[i * n + place for place in mixed_by_definition(*row, k)] for i, row in rows]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(indices, "_on_host", lambda x: path == "numpy")
        assert mixed_indices(x, error, k).tolist() == expected


def test_mixed_indices_take_from_both_and_fill_up():
    x = torch.tensor([[9.0, 8.0, 0.0, 0.0, 3.0, 3.0, 0.0]])
    error = torch.tensor([[0.0, 7.0, 6.0, 0.0, -3.0, 2.0, 1.0]])
    # 9 and 8 of x, 7 and 6 of the error, of which one is there already; then 3 + 2
    assert mixed_indices(x, error, 4).tolist() == [[0, 1, 2, 5]]
    assert mixed_indices(x, torch.zeros(1, 7), 1).tolist() == [[0]]


def test_mixed_indices_are_k_even_where_all_is_nan():
    x, error = torch.full((1, 9), torch.nan), torch.arange(9.0)[None]
    x.view(torch.int32)[:] = 2**31 - 1
    assert mixed_indices(x, error, 4).tolist() == [[0, 1, 7, 8]]
