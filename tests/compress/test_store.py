"""What every store keeps, on whatever medium: the exact bytes of a row, and the same values at both ends."""

import hashlib
import io
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.codec_helpers import assert_identical, gaussian, roundtrip
from support.slow_disk import slots
from thinwire.compress.stores.disk import DiskStore
from thinwire.compress.stores.memory import MemoryStore
from thinwire.compress.stores.store import StoreError, StoreLayout

BITS = (32, 16, 8, 4)
MEDIA = ("memory", "disk")
CODECS = {32: "none", 16: "bf16", 8: "q(8)", 4: "q(4)"}


def rounded(values, bits):
    """What a store of ``bits`` makes of ``values``, each row through the codec on its own."""
    rows = [roundtrip(CODECS[bits], row.reshape(1, *(row.shape or (1,)))).view(row.shape) for row in values.float()]
    return torch.stack(rows)


@contextmanager
def opened(medium, layout, **options):
    """A store of ``medium``; one on disk in a directory of its own, with room for two rows on either way."""
    with tempfile.TemporaryDirectory() as directory:
        bounds = {"pending_bytes": 2 * layout.row_bytes, "ahead_bytes": 2 * layout.row_bytes}
        on_disk = medium == "disk"
        with closing(DiskStore(layout, Path(directory, "rows"), **bounds) if on_disk else MemoryStore(layout)) as store:
            yield store


@pytest.fixture(params=MEDIA)
def medium(request):
    return request.param


@pytest.mark.parametrize(
    ("row_shape", "row_bytes"),
    [
        ((), (4, 2, 2 + 1, 2 + 1)),
        ((7,), (28, 14, 2 + 7, 2 + 4)),
        ((3, 5), (60, 30, 3 * 2 + 15, 3 * 2 + 8)),  # a scale for each token
        ((2, 4, 4), (128, 64, 2 * 2 + 32, 2 * 2 + 16)),  # a scale for each channel map
        ((2, 3, 4, 5), (480, 240, 2 * 2 + 120, 2 * 2 + 60)),
    ],
)
def test_sizes_are_exact(row_shape, row_bytes):
    for bits, expected in zip(BITS, row_bytes, strict=True):
        layout = StoreLayout(num_slots=11, row_shape=row_shape, bits=bits)
        assert (layout.row_bytes, layout.nbytes) == (expected, 11 * expected)
        assert layout.encode(gaussian(3, *row_shape)).shape == (3, expected)


@pytest.mark.parametrize(
    ("bits", "row"),
    [
        (32, "0000803f 000080bf 9a99993e 00000040 000000c0 00000000"),
        (16, "803f 80bf 9a3e 0040 00c0 0000"),
        (8, "803f 0040 00ff5a 00ff80"),  # scales 1.0 and 2.0, then the codes of both rows
        (4, "803f 0040 f0 06 8f"),
    ],
)
def test_golden_rows(bits, row):
    layout = StoreLayout(num_slots=1, row_shape=(2, 3), bits=bits)
    encoded = layout.encode(torch.tensor([[[1.0, -1.0, 0.3], [2.0, -2.0, 0.0]]]))
    assert bytes(encoded[0].tolist()).hex() == row.replace(" ", "")


@pytest.mark.parametrize("row_shape", [(), (5,), (3, 5), (4, 6), (3, 4, 4), (3, 3, 3)])
@pytest.mark.parametrize("bits", BITS)
def test_a_row_is_stored_as_if_it_were_alone(bits, row_shape):
    layout = StoreLayout(num_slots=1, row_shape=row_shape, bits=bits)
    values = gaussian(6, *row_shape) * torch.tensor([1e-6, 1, 1e3, 1e-2, 7, 1e20]).view(6, *[1] * len(row_shape))
    together = layout.encode(values)
    for row, value in zip(together, values, strict=True):
        assert_identical(layout.encode(value[None])[0], row)
        assert_identical(layout.decode(row[None])[0], rounded(value[None], bits)[0])
    assert_identical(layout.decode(together), rounded(values, bits))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 2}, "a store's bits a value must be one of 32, 16, 8, 4, got 2"),
        ({"num_slots": 0}, "at least one slot, and rows with at least one value, got num_slots=0 and row_shape=(2,)"),
        ({"row_shape": (3, 0)}, "at least one slot, and rows with at least one value, got num_slots=4"),
    ],
)
def test_layouts_that_cannot_be(options, message):
    with pytest.raises(StoreError) as error:
        StoreLayout(**{"num_slots": 4, "row_shape": (2,)} | options)
    assert message in str(error.value)


@pytest.mark.parametrize("bits", BITS)
def test_a_write_returns_what_reads_will_give(medium, bits):
    values = gaussian(3, 6, 7, scale=5)
    with opened(medium, StoreLayout(num_slots=9, row_shape=(6, 7), bits=bits)) as store:
        stored = store.write(slots(4, 0, 8), values)
        assert_identical(stored, rounded(values, bits))
        assert_identical(store.read(slots(8, 4)), stored[[2, 0]])
        store.flush()
        assert_identical(store.read(slots(4, 0, 8)), stored)
        assert store.read(slots(4)).dtype == stored.dtype == torch.float32


def test_fewer_bits_lose_more(medium):
    values = gaussian(2, 64, 64)
    errors = []
    for bits in BITS:
        with opened(medium, StoreLayout(num_slots=2, row_shape=(64, 64), bits=bits)) as store:
            store.write(slots(0, 1), values)
            errors.append((store.read(slots(0, 1)) - values).norm().item() / values.norm().item())
    assert errors[0] == 0
    for error, low, high in zip(errors[1:], (0.001, 0.004, 0.08), (0.003, 0.008, 0.13), strict=True):
        assert low < error < high, errors


@pytest.mark.parametrize("bits", BITS)
def test_slots_never_written_are_unknown_and_zero(medium, bits):
    values = gaussian(1, 5)
    with opened(medium, StoreLayout(num_slots=4, row_shape=(5,), bits=bits)) as store:
        assert not store.known(slots(0, 1, 2, 3)).any()
        store.prefetch(slots(0, 1))
        store.write(slots(2), values)
        assert store.known(slots(2, 0, 3)).tolist() == [True, False, False]
        read = store.read(slots(3, 2, 0))
        assert_identical(read, torch.cat([torch.zeros(1, 5), rounded(values, bits), torch.zeros(1, 5)]))
        assert not read[[0, 2]].signbit().any()
        assert list(store.digests()) == [2]


@pytest.mark.parametrize("bits", BITS)
def test_two_stores_fed_the_same_hold_the_same_bytes(bits):
    """Both ends of a channel, whatever each keeps its rows on."""
    layout = StoreLayout(num_slots=5, row_shape=(3, 4), bits=bits)
    values = gaussian(4, 3, 4)
    with opened("memory", layout) as here, opened("memory", layout) as there, opened("disk", layout) as on_disk:
        for store in (here, there, on_disk):
            store.write(slots(1, 3), values[:2])
            store.write(slots(3, 0), values[2:])
        rows = layout.encode(values)
        expected = {
            slot: hashlib.sha256(bytes(rows[row].tolist())).hexdigest() for slot, row in {0: 3, 1: 0, 3: 2}.items()
        }
        assert here.digests() == there.digests() == on_disk.digests() == expected
        there.write(slots(3), torch.nextafter(values[2:3], torch.tensor(9.0)) if bits == 32 else values[2:3] * 1.1)
        assert {slot for slot, digest in there.digests().items() if digest != expected[slot]} == {3}


@pytest.mark.parametrize("bits", BITS)
def test_values_of_any_dtype_and_strides_are_copied_in(medium, bits):
    wide = gaussian(3, 4, 6, dtype=torch.bfloat16)
    values = wide.transpose(1, 2).requires_grad_()
    expected = rounded(values.detach(), bits)
    with opened(medium, StoreLayout(num_slots=3, row_shape=(6, 4), bits=bits)) as store:
        stored = store.write(slots(0, 1, 2), values)
        assert not stored.requires_grad
        wide.zero_()
        assert_identical(store.read(slots(0, 1, 2)), expected)
        plain = gaussian(1, 6, 4)
        kept = store.write(slots(1), plain).clone()
        plain.zero_()
        store.read(slots(1)).zero_()
        assert_identical(store.read(slots(1)), kept)


@pytest.mark.parametrize("bits", BITS)
def test_what_is_not_finite_spoils_its_own_row_only(medium, bits):
    values = gaussian(4, 2, 8)
    values[0, 0, 3], values[2, 1, 0] = torch.nan, torch.inf
    with opened(medium, StoreLayout(num_slots=4, row_shape=(2, 8), bits=bits)) as store:
        store.write(slots(0, 1, 2, 3), values)
        read = store.read(slots(0, 1, 2, 3))
        assert_identical(read[[1, 3]], rounded(values[[1, 3]], bits))
        assert not read[0, 0].isfinite().all() and not read[2, 1].isfinite().all()
        assert read[0, 1].isfinite().all() and read[2, 0].isfinite().all()


@pytest.mark.parametrize("slot", [-1, 4])
def test_slots_outside_are_refused(medium, slot):
    with opened(medium, StoreLayout(num_slots=4, row_shape=(2,))) as store:
        for call in (store.known, store.read, store.prefetch, lambda slots: store.write(slots, torch.ones(2, 2))):
            with pytest.raises(StoreError, match=f"a slot must be from 0 to 3, got {slot}"):
                call(slots(2, slot))
        assert not store.known(slots(2)).any()


def test_a_slot_named_twice_is_refused(medium):
    with opened(medium, StoreLayout(num_slots=4, row_shape=(2,))) as store:
        with pytest.raises(StoreError, match=r"name each slot once, got \[3, 1, 3\]"):
            store.write(slots(3, 1, 3), torch.ones(3, 2))
        assert not store.known(slots(1, 3)).any()
        store.write(slots(3), torch.ones(1, 2))
        assert_identical(store.read(slots(3, 3)), torch.ones(2, 2))


@pytest.mark.parametrize("bits", BITS)
def test_no_slots_at_all(medium, bits):
    with opened(medium, StoreLayout(num_slots=4, row_shape=(2, 3), bits=bits)) as store:
        none = slots()
        store.prefetch(none)
        assert store.write(none, torch.empty(0, 2, 3)).shape == store.read(none).shape == (0, 2, 3)
        assert store.known(none).shape == (0,) and store.digests() == {}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("destination", MEDIA)
def test_content_moves_between_media(medium, destination, bits):
    layout = StoreLayout(num_slots=6, row_shape=(3, 5), bits=bits)
    with opened(medium, layout) as source, opened(destination, layout) as target:
        source.write(slots(5, 1, 2), gaussian(3, 3, 5))
        expected, digests = source.read(slots(5, 1, 2)), source.digests()
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        source.write(slots(1, 0), gaussian(2, 3, 5, seed=1))
        target.write(slots(0, 1), gaussian(2, 3, 5, seed=2))
        target.prefetch(slots(0, 1))
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=True))
        assert target.known(torch.arange(6)).tolist() == [False, True, True, False, False, True]
        assert_identical(target.read(slots(5, 1, 2)), expected)
        assert_identical(target.read(slots(0)), torch.zeros(1, 3, 5))
        assert target.digests() == digests


def test_a_state_holds_only_what_was_written(medium):
    layout = StoreLayout(num_slots=1000, row_shape=(4,))
    with opened(medium, layout) as store:
        store.write(slots(999, 7), torch.tensor([[9.0] * 4, [7.0] * 4]))
        state = store.state_dict()
        assert_identical(state["rows"].view(torch.float32), torch.tensor([[7.0] * 4, [9.0] * 4]))
        assert state["known"].nonzero().flatten().tolist() == [7, 999]


def test_a_state_of_another_layout_is_refused(medium):
    with opened(medium, StoreLayout(num_slots=4, row_shape=(2,), bits=8)) as store:
        store.write(slots(1), torch.ones(1, 2))
        state = MemoryStore(StoreLayout(num_slots=4, row_shape=(2,), bits=4)).state_dict()
        with pytest.raises(StoreError, match=r"bits=4\), got .*bits=8\); open it with the saved settings"):
            store.load_state_dict(state)
        assert store.known(slots(1)).all()


@pytest.mark.slow
def test_memory_is_used_only_for_rows_written():
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("needs /proc to see how much memory is in use")

    def used_pages():
        return int(status.read_text().split()[1])

    before = used_pages()
    with closing(MemoryStore(StoreLayout(num_slots=1 << 16, row_shape=(4096,)))) as store:  # 1 GiB
        assert (used_pages() - before) * 4096 < 32 << 20
        store.write(torch.arange(4096), torch.ones(4096, 4096))
        assert (used_pages() - before) * 4096 > 64 << 20


def test_more_than_memory_can_ever_be_is_one_sentence():
    for width in (1 << 35, 1 << 45):
        with pytest.raises(
            StoreError, match=f"a store of {width << 22} bytes does not fit into memory; keep it on disk"
        ):
            MemoryStore(StoreLayout(num_slots=1 << 20, row_shape=(width,)))


def test_closing_twice(medium):
    with opened(medium, StoreLayout(num_slots=1, row_shape=(1,))) as store:
        store.close()


OPERATIONS = ("write", "read", "prefetch", "flush", "reload")


@pytest.mark.slow
@settings(max_examples=100)
@given(
    medium=st.sampled_from(MEDIA),
    bits=st.sampled_from(BITS),
    row_shape=st.sampled_from([(), (3,), (2, 4), (2, 3, 5)]),
    operations=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.lists(st.integers(0, 5), max_size=5, unique=True)), max_size=40
    ),
)
def test_any_sequence_agrees_with_a_dictionary(medium, bits, row_shape, operations):
    model = {}
    with opened(medium, StoreLayout(num_slots=6, row_shape=row_shape, bits=bits)) as store:
        for seed, (operation, indices) in enumerate(operations):
            if operation == "write" and indices:
                values = gaussian(len(indices), *row_shape, seed=seed)
                expected = rounded(values, bits)
                assert_identical(store.write(slots(*indices), values), expected)
                model |= dict(zip(indices, expected, strict=True))
            elif operation == "read":
                read = store.read(slots(*indices))
                for slot, row in zip(indices, read, strict=True):
                    assert_identical(row, model.get(slot, torch.zeros(row_shape)))
            elif operation == "prefetch":
                store.prefetch(slots(*indices))
            elif operation == "flush":
                store.flush()
            elif operation == "reload":
                store.load_state_dict(store.state_dict())
            assert store.known(torch.arange(6)).tolist() == [slot in model for slot in range(6)]
        assert set(store.digests()) == set(model)


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
@pytest.mark.parametrize("wanted", [[4, 0, 8], [3, 4, 5], [6, 7, 1, 2, 4], [2, 9], [10, 11]])
def test_what_is_lent_is_what_is_read_and_what_is_kept_is_what_would_be_written(bits, wanted):
    layout = StoreLayout(num_slots=12, row_shape=(2, 3), bits=bits)
    lending, plain = MemoryStore(layout), MemoryStore(layout)
    filled = torch.randn(9, 2, 3, generator=torch.Generator().manual_seed(0))
    for store in (lending, plain):
        store.write(torch.arange(9), filled)
    changes = torch.randn(len(wanted), 2, 3, generator=torch.Generator().manual_seed(1))
    before = plain.read(slots(*wanted))
    loan = lending.borrow(slots(*wanted))
    assert_identical(torch.cat(loan.parts), before)
    assert loan.live == (bits == 32 and max(wanted) < 9)
    for part, change in zip(loan.parts, loan.split(changes), strict=True):
        part.add_(change)
    lending.keep(loan)
    plain.write(slots(*wanted), before + changes)
    assert lending.digests() == plain.digests()
    assert_identical(lending.read(slots(*wanted)), plain.read(slots(*wanted)))


def test_a_loan_of_one_slot_twice_cannot_be_kept():
    with closing(MemoryStore(StoreLayout(num_slots=4, row_shape=(2,)))) as store:
        store.write(torch.arange(4), torch.ones(4, 2))
        with pytest.raises(StoreError, match="a write must name each slot once"):
            store.keep(store.borrow(slots(1, 1)))


def test_consecutive_slots_are_lent_as_one_part():
    with closing(MemoryStore(StoreLayout(num_slots=9, row_shape=(2,)))) as store:
        store.write(torch.arange(9), torch.ones(9, 2))
        assert [len(part) for part in store.borrow(slots(3, 4, 5, 8, 0, 1)).parts] == [3, 1, 2]
