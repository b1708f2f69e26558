"""A compiled end and an eager one must decode the same bits, or buffers kept at both ends would drift apart.

Missing are what torch 2.15 does not compile: topk with plain values, because inductor's fake tensors refuse to view
bytes at an odd offset as floats; randk, because it draws with NumPy.
"""

import shutil

import pytest
import torch

from thinwire.compress import Key, parse

pytestmark = pytest.mark.slow

KEY = Key(0, 0, "activations", "train", 0, 0, 0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
@pytest.mark.parametrize("expression", ['q(3, scale="minmax")', "fp8", 'topk(0.1, values="q(8)")'])
def test_compiled_and_eager_decodes_are_equal_bit_for_bit(expression):
    from torch._inductor import config

    if expression.startswith("topk") and torch.__version__ < "2.13":
        pytest.skip("inductor of torch 2.11 does not view bytes as booleans")
    codec = parse(expression)
    x = torch.randn(4, 33, 65, generator=torch.Generator().manual_seed(0))
    payload = torch.empty(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8)
    codec.encode(x, payload, KEY)
    eager, compiled = torch.empty_like(x), torch.zeros_like(x)
    codec.decode(payload, eager, KEY)
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # over ten programs are compiled here: their headers once, which the fewer programs of other tests do not pay for
    with config.patch(cpp_cache_precompile_headers=True):
        torch.compile(codec.decode)(payload, compiled, KEY)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs, "nothing was compiled"
    assert torch.equal(eager, compiled)
