"""Words that a GPU makes are those that NumPy draws; torch makes them on a CPU here."""

import numpy as np
import pytest
import torch

from support.codec_helpers import KEY
from support.gpus import GPU, FakeGpu, fake_put
from thinwire.compress import words
from thinwire.compress.words import DeviceWords

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, KEY.number])
@pytest.mark.parametrize("counts", [(1, 5, 0, 4095, 2), (4096, 1, 4097), (3 * 4096 + 5, 12)])
def test_words_made_from_their_places_are_those_that_are_drawn_in_turn(seed, counts):
    made, drawn = DeviceWords(seed, CPU), np.random.PCG64(seed)
    for count in counts:
        assert made(count).tolist() == drawn.random_raw(count).view(np.int64).tolist()


def test_more_words_than_are_made_at_once(monkeypatch):
    monkeypatch.setattr(words, "_BLOCKS", 3)
    monkeypatch.setattr(words, "tables", words.tables.__wrapped__)
    made, drawn = DeviceWords(7, CPU), np.random.PCG64(7)
    for count in (8 * 4096 + 9, 100):
        assert made(count).tolist() == drawn.random_raw(count).view(np.int64).tolist()


def test_a_key_has_the_words_of_its_number_and_a_gpu_makes_them(monkeypatch):
    assert torch.equal(KEY.words(CPU)(70), DeviceWords(KEY.number, CPU)(70))
    monkeypatch.setattr(words, "put", fake_put)
    monkeypatch.setattr(words, "tables", words.tables.__wrapped__)
    with FakeGpu():
        source = KEY.words(GPU)
        assert isinstance(source, DeviceWords) and source(70).device == GPU
