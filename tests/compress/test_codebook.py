"""q's option codebook: both ends learn the same rows, and a message is read from what the page says alone."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from support.codec_contract import documented
from support.codec_helpers import KEY, gaussian
from thinwire.compress import CodecError, Decoder, Encoder, Microbatch, parse
from thinwire.compress.buffers import SlotCounts
from thinwire.compress.codecs.fused import codebook
from thinwire.compress.stores.memory import MemoryStore

ROWS, WIDTH = 48, 64
SAMPLES = 2


def hidden(seed, kinds=40, of=0):
    """Rows of a few kinds, as those of tokens; the first of each sample is massive. Other kinds for another `of`."""
    chance = torch.Generator().manual_seed(seed)
    which = torch.randint(kinds, (SAMPLES, ROWS), generator=chance)
    x = gaussian(kinds, WIDTH, seed=1000 + of)[which] + 0.3 * torch.randn(SAMPLES, ROWS, WIDTH, generator=chance)
    x[0, 0, 5] = 9000.0
    return x


class Channel:
    """Both ends of a channel, in one process."""

    def __init__(self, expression, example=None):
        example = hidden(0) if example is None else example
        self.ends = [
            kind(
                parse(expression),
                example,
                counts=SlotCounts(positions=SAMPLES, samples=8, evaluation_samples=8),
                make_store=lambda layout, purpose: MemoryStore(layout),
            )
            for kind in (Encoder, Decoder)
        ]
        self.steps = count()

    def send(self, x, kind="train", samples=(0, 1), finite=True):
        """What arrives of `x`, and the bytes that were sent."""
        sender, receiver = self.ends
        microbatch = Microbatch(kind, range(len(x)), torch.tensor(samples), next(self.steps), 0)
        plan, again = sender.plan(microbatch), receiver.plan(microbatch)
        payload = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8)
        encoded = sender.encode(x, payload, KEY, plan)
        used = sender.used(payload, plan)
        sender.settle(encoded)
        out = torch.empty_like(x)
        receiver.decode(payload, out, KEY, again, finite=finite)
        return out, bytes(payload[:used].tolist())

    @property
    def entries(self):
        """The table of each end."""
        return [
            end.buffers.state_dict()["codebook"]["rows"].view(torch.float32).view(-1, WIDTH + 2) for end in self.ends
        ]


def bits(payload, x):
    return 8 * len(payload) / x.numel()


def test_rows_that_come_again_take_fewer_bits_at_the_same_error():
    channel, plain = Channel("q(8, step=0.2, codebook=128)"), Channel("q(8, step=0.2)")
    for step in range(12):
        x = hidden(step)
        out, payload = channel.send(x)
        without, usual = plain.send(x)
        least = (x.square().mean(-1, keepdim=True).sqrt() * 0.2 / 2 * 1.02).expand(x.shape)
        assert ((out - x).abs() <= least).all() and ((without - x).abs() <= least).all()
    assert bits(payload, x) < bits(usual, x) - 1
    assert torch.equal(*channel.entries) and channel.ends[0].buffers.digests() == channel.ends[1].buffers.digests()


def test_other_rows_replace_those_that_were_learned():
    channel = Channel("q(8, step=0.2, codebook=64)")
    sizes = [bits(channel.send(hidden(step, of=step // 10))[1], hidden(step)) for step in range(20)]
    assert sizes[10] > sizes[9] + 0.5 > sizes[19] + 0.3, "another text is learned as the first one was"


def test_only_training_predicts_and_teaches():
    channel = Channel("q(8, step=0.2, codebook=64)")
    for step in range(3):
        channel.send(hidden(step))
    before = [table.clone() for table in channel.entries]
    fresh = Channel("q(8, step=0.2, codebook=64)")
    assert channel.send(hidden(9), "eval-on")[1] == fresh.send(hidden(9), "eval-on")[1], "a score can be repeated"
    for kind in ("eval-off", "warmup"):
        assert torch.equal(channel.send(hidden(9), kind)[0], hidden(9))
    assert all(torch.equal(*each) for each in zip(before, channel.entries, strict=True))


def test_a_channel_goes_on_from_its_state():
    channel, other = Channel("q(8, step=0.2, codebook=64)"), Channel("q(8, step=0.2, codebook=64)")
    for step in range(4):
        channel.send(hidden(step))
    for end, saved in zip(other.ends, channel.ends, strict=True):
        end.load_state_dict(saved.state_dict())
    for step in (4, 5):
        assert channel.send(hidden(step))[1] == other.send(hidden(step))[1]
    for end in other.ends:
        end.load_state_dict({})
    assert other.send(hidden(0))[1] == Channel("q(8, step=0.2, codebook=64)").send(hidden(0))[1]


class FromThePage:
    """The entries, by the three rules of docs/reference/codecs-other.md, in Python's integers."""

    def __init__(self, entries):
        self.rows, self.counts, self.used = [[0] * WIDTH for _ in range(entries)], [0] * entries, [0] * entries
        self.messages = 0

    def read(self, payload, rows):
        read = documented("read_steps")
        return torch.tensor(read(payload, rows, WIDTH, entries=self.rows)).view(rows, WIDTH)

    def learn(self, payload, rows):
        self.messages += 1
        named = [int.from_bytes(payload[4 + 2 * (rows + row) :][:2], "little") for row in range(rows)]
        wide = [payload[5 + 2 * row] >= 128 for row in range(rows)]
        plain = documented("read_integers")(payload[4 + 4 * rows :], rows, WIDTH)
        integers = [plain[row * WIDTH : (row + 1) * WIDTH] if not wide[row] else [0] * WIDTH for row in range(rows)]
        arrived = [
            [16 * k + e for k, e in zip(integers[row], self.rows[named[row]], strict=True)] for row in range(rows)
        ]
        new = [3 * sum((16 * k) ** 2 for k in integers[row]) > sum(c**2 for c in arrived[row]) for row in range(rows)]
        for entry in sorted({named[row] for row in range(rows) if not new[row] and named[row]}):
            of = [integers[row] for row in range(rows) if named[row] == entry and not new[row]]
            total = len(of) + self.counts[entry]
            moves = ((32 * sum(column) + total) // (2 * total) for column in zip(*of, strict=True))
            self.rows[entry] = [e + move for e, move in zip(self.rows[entry], moves, strict=True)]
            self.counts[entry], self.used[entry] = min(16, total), self.messages
        free = sorted(range(1, len(self.rows)), key=lambda entry: (self.used[entry], entry))
        free = iter([entry for entry in free if self.used[entry] < self.messages])
        for row, entry in zip((row for row in range(rows) if new[row]), free):  # noqa: B905  there may be too few places
            self.rows[entry], self.counts[entry], self.used[entry] = arrived[row], 1, self.messages


def test_a_receiver_made_from_the_page_alone_reads_and_learns_the_same():
    channel, page = Channel("q(8, step=0.2, codebook=60)"), FromThePage(60)
    for step in range(6):
        out, payload = channel.send(hidden(step))
        assert torch.equal(page.read(payload, SAMPLES * ROWS), out.view(-1, WIDTH))
        page.learn(payload, SAMPLES * ROWS)
        expected = torch.tensor(page.rows), torch.tensor(page.counts), torch.tensor(page.used)
        table = channel.entries[1].long()
        assert torch.equal(table[:, :WIDTH], expected[0])
        assert torch.equal(table[:, WIDTH], expected[1]) and torch.equal(table[:, WIDTH + 1], expected[2])
    assert len(set(page.used)) > 3, "entries are replaced and moved"


@pytest.mark.parametrize("of", [gaussian, lambda *shape: gaussian(*shape) / gaussian(*shape, seed=1), torch.zeros])
def test_whatever_the_values_both_ends_agree_and_payloads_of_one_length_hold_the_same(of):
    coded, plain = Channel("q(8, step=0.2, codebook=16)"), Channel('q(8, step=0.2, codebook=16, code="plain")')
    assert parse("q(8, step=0.2, codebook=16)").of_known_length() == plain.ends[0].method
    for step in range(4):
        x = of(SAMPLES, ROWS, WIDTH).roll(step) if step else of(SAMPLES, ROWS, WIDTH)
        x[1, 5:9] *= 1000
        assert torch.equal(coded.send(x)[0], plain.send(x)[0])
    assert torch.equal(*coded.entries) and torch.equal(coded.entries[0], plain.entries[1])


@pytest.mark.parametrize(
    "of", [hidden, lambda seed: gaussian(SAMPLES, ROWS, WIDTH, seed=seed) / gaussian(1, seed=seed)]
)
def test_torch_operations_and_kernels_send_and_learn_the_same(of, monkeypatch):
    """What is on a GPU, and a machine where Numba does not work, take the former."""
    with_kernels, without = Channel("q(8, step=0.3, codebook=40)"), Channel("q(8, step=0.3, codebook=40)")
    for step in range(6):
        x = of(step)
        x[1, 7], x[1, 8, 3], x[0, 9] = 0, torch.nan if step == 4 else 3e38, 1e-39
        monkeypatch.undo()
        expected = with_kernels.send(x, finite=False)
        monkeypatch.setattr(codebook, "cover", lambda *tensors: False)
        found = without.send(x, finite=False)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0, equal_nan=True)
        assert found[1] == expected[1] and torch.equal(*without.entries)
        assert torch.equal(with_kernels.entries[0], without.entries[0])


def test_first_visits_of_aqsgd_use_it():
    channel = Channel("aqsgd(q(2), first=q(8, step=0.1, codebook=64))")
    sizes = [len(channel.send(hidden(step), samples=(2 * step, 2 * step + 1))[1]) for step in range(4)]
    assert sizes[3] < 0.85 * sizes[0] and torch.equal(*channel.entries)
    before = channel.entries[0].clone()
    channel.send(hidden(0) + 0.01)  # a second visit sends a difference
    assert torch.equal(before, channel.entries[0])


@pytest.mark.parametrize("shape", [(6,), (2, 3, 8, 8)])
def test_tensors_without_rows_of_tokens_are_sent_as_without_it(shape):
    x = gaussian(*shape)
    assert Channel("q(8, step=0.2, codebook=64)", x).send(x)[1] == Channel("q(8, step=0.2)", x).send(x)[1]


def test_an_entry_that_does_not_exist_is_a_damaged_payload():
    channel = Channel("q(8, step=0.2, codebook=64)")
    sender, receiver = channel.ends
    microbatch = Microbatch("train", range(SAMPLES), torch.arange(SAMPLES))
    plan = sender.plan(microbatch)
    payload = torch.zeros(plan.nbytes, dtype=torch.uint8)
    sender.encode(hidden(0), payload, KEY, plan)
    payload[4 + 2 * SAMPLES * ROWS] = 64
    with pytest.raises(CodecError, match="entries must be below 64, got 64"):
        receiver.decode(payload, torch.empty_like(hidden(0)), KEY, plan)


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        (
            "q(8, codebook=64)",
            "with a step of their own, got q\\(8, codebook=64\\); write q\\(8, step=0.2, codebook=64\\)",
        ),
        ("q(16, step=0.2, codebook=64)", "rows of 8 bits"),
        ('q(8, step=0.2, codebook=64, per="tensor")', "rows of 8 bits"),
        ("q(8, step=0.2, codebook=1)", "codebook must be an integer from 2 to 65536, got 1"),
        ("ef(q(8, step=0.2, codebook=64))", "its rows are differences; drop codebook"),
    ],
)
def test_a_codebook_where_none_can_be_is_one_sentence(expression, sentence):
    with pytest.raises(CodecError, match=sentence):
        parse(expression)


def test_a_codec_alone_predicts_nothing():
    codec, x = parse("q(8, step=0.2, codebook=64)"), hidden(0)
    out = torch.empty_like(x)
    payload = torch.zeros(codec.nbytes(x.shape, x.dtype), dtype=torch.uint8)
    codec.encode(x, payload, KEY)
    codec.decode(payload, out, KEY)
    usual = torch.empty_like(x)
    plain = replace(codec, codebook=None)
    payload = torch.zeros(plain.nbytes(x.shape, x.dtype), dtype=torch.uint8)
    plain.encode(x, payload, KEY)
    plain.decode(payload, usual, KEY)
    assert torch.equal(out, usual)
