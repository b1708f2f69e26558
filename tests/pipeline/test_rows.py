"""The rows of a store in the files of checkpoints."""

import pytest
import torch

from support.codec_helpers import assert_identical
from support.slow_disk import LAYOUT, rows, slots
from thinwire.compress.stores.disk import DiskStore
from thinwire.compress.stores.memory import MemoryStore
from thinwire.pipeline.errors import CheckpointError
from thinwire.pipeline.saving.checkpoint_folder import reading
from thinwire.pipeline.saving.rows import file_of, read_rows, steps_in, table_of


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    made = MemoryStore(LAYOUT) if request.param == "memory" else DiskStore(LAYOUT, tmp_path / "live.slots")
    yield made
    made.close()


def save(store, part, step, table):
    """Write what has changed, and note it in the table."""
    snapshot = store.snapshot()
    path = part / file_of("s", step)
    path.write_bytes(b"".join(row.numpy().tobytes() for row in snapshot.rows))
    for place, slot in enumerate(snapshot.slots):
        table[slot] = torch.tensor([step, place])
    return path


def load(store, part, table):
    with reading(part):
        store.restore(table[:, 0] >= 0, read_rows(part, "s", table, LAYOUT.row_bytes))


def content(store):
    return store.read(torch.arange(LAYOUT.num_slots))


def test_files_of_several_steps_give_each_of_their_moments_back(store, tmp_path):
    table, moments = table_of(LAYOUT.num_slots), []
    for step, written in enumerate([(0, 1, 2, 3), (2, 3, 4), (0, 4)]):
        store.write(slots(*written), rows(len(written)) + step)
        save(store, tmp_path, step, table)
        moments.append((content(store), table.clone()))
    assert [steps_in(each) for _, each in moments] == [[0], [0, 1], [0, 1, 2]]
    for wanted, table in moments:
        load(store, tmp_path, table)
        assert_identical(content(store), wanted)
        assert store.snapshot().slots == [], "what was restored is saved already"


@pytest.mark.parametrize("damage", ["cut", "gone", "folder"])
def test_a_file_that_lacks_rows_is_a_sentence(store, tmp_path, damage):
    table = table_of(LAYOUT.num_slots)
    store.write(slots(0, 1), rows(2))
    path = save(store, tmp_path, 7, table)
    whole = path.read_bytes()
    path.unlink()
    match damage:
        case "cut":
            path.write_bytes(whole[:-1])
        case "folder":
            path.mkdir()
    with pytest.raises(CheckpointError, match=r"damaged|cannot be read"):
        load(store, tmp_path, table)


@pytest.mark.parametrize("place", [-1, 2, 1 << 60, -(1 << 60)])
def test_a_place_that_does_not_exist_is_a_sentence(store, tmp_path, place):
    """A table of another host ended in an OverflowError."""
    table = table_of(LAYOUT.num_slots)
    store.write(slots(0, 1), rows(2))
    save(store, tmp_path, 7, table)
    table[1, 1] = place
    with pytest.raises(CheckpointError, match=r"s\.00000007\.rows has 2 rows, and not all that its checkpoint names"):
        load(store, tmp_path, table)
