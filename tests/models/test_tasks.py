import math

import pytest
import torch
from torch.nn import functional

from support.allocated import peak_bytes
from support.own_code import add_module
from thinwire.models import tasks
from thinwire.models.errors import ModelError
from thinwire.models.tasks import IGNORE, Classification, LanguageModeling, mask_padding, matthews, own_task

TASK = LanguageModeling()


@pytest.fixture
def output() -> torch.Tensor:
    return torch.randn(6, 5, 11, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.fixture
def target() -> torch.Tensor:
    """Unequal masks: rows 0 and 1 keep everything, 2 and 3 lose most, 4 and 5 everything."""
    target = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(1))
    target[2:4, 1:] = IGNORE
    target[4:] = IGNORE
    return target


def test_loss_sum_adds_up_the_valid_targets(output, target):
    log_probabilities = output.log_softmax(-1)
    expected = -sum(log_probabilities[b, t, target[b, t]] for b in range(4) for t in range(5 if b < 2 else 1))
    torch.testing.assert_close(TASK.loss_sum(output, target), expected)
    assert TASK.num_valid(target) == 12


def test_sums_of_micro_batches_make_the_mean_of_the_batch(output, target):
    whole = functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORE)
    [expected] = torch.autograd.grad(whole, output, retain_graph=True)

    pairs = list(zip(output.split(2), target.split(2), strict=True))
    loss = sum(TASK.loss_sum(o, t) for o, t in pairs) / sum(TASK.num_valid(t) for _, t in pairs)
    [got] = torch.autograd.grad(loss, output)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(got, expected)

    mean_of_means = sum(TASK.loss_sum(o, t) / TASK.num_valid(t) for o, t in pairs[:2]) / 2
    assert abs(mean_of_means - whole) > 0.01, "these masks cannot tell the two apart"


def test_a_fully_masked_micro_batch_is_worth_nothing(output, target):
    loss = TASK.loss_sum(output[4:], target[4:])
    [gradient] = torch.autograd.grad(loss, output)
    assert loss.item() == 0
    torch.testing.assert_close(gradient, torch.zeros_like(output), rtol=0, atol=0)
    assert TASK.num_valid(target[4:]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_in_parts_has_the_gradients_of_the_whole(monkeypatch, output, target, dtype):
    """Bit for bit, also where the loss is scaled, some rows are masked and the last part is short."""
    logits = output.detach().to(dtype).requires_grad_()
    whole = TASK.loss_sum(logits, target)
    [expected] = torch.autograd.grad(whole / 7, logits)
    monkeypatch.setattr(tasks, "_WHOLE", 4 * 11)
    monkeypatch.setattr(tasks, "_PART", 4 * 11)
    in_parts = TASK.loss_sum(logits, target)
    [got] = torch.autograd.grad(in_parts / 7, logits)
    assert torch.equal(got, expected)
    assert got.dtype == dtype
    torch.testing.assert_close(in_parts, whole)


@pytest.mark.slow
def test_a_loss_of_a_large_vocabulary_holds_the_logits_once_more(monkeypatch):
    logits = torch.zeros(1, 256, 2**16, requires_grad=True)
    target = torch.zeros(1, 256, dtype=torch.int64)
    assert peak_bytes(lambda: TASK.loss_sum(logits, target).backward()) < 1.3 * logits.nbytes, "their gradient"
    with torch.no_grad():
        assert peak_bytes(lambda: TASK.loss_sum(logits, target)) < 0.2 * logits.nbytes


def test_the_sum_is_taken_in_float32():
    output = torch.zeros(8, 128, 256, dtype=torch.bfloat16)
    loss = TASK.loss_sum(output, torch.zeros(8, 128, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss.item(), 1024 * math.log(256), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("loss", "perplexity"), [(0.0, 1.0), (math.log(21.0), 21.0), (1e6, math.inf), (math.nan, math.nan)]
)
def test_perplexity(loss, perplexity):
    found = TASK.metrics(loss, TASK.observe(torch.empty(0), torch.empty(0)))
    assert found == {"perplexity": pytest.approx(perplexity, nan_ok=True)}


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 4)])
def test_mask_padding(shape):
    target = torch.ones(shape, dtype=torch.int64)
    masked = mask_padding(target, torch.tensor([True, False, True]))
    assert masked.shape == shape
    assert masked.dtype == torch.int64
    assert (masked[1] == IGNORE).all()
    assert (masked[[0, 2]] == 1).all()
    assert (target == 1).all()


def test_language_modeling_tells_its_perplexity():
    counts = TASK.observe(torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64))
    assert counts.shape == (0,)
    assert counts.dtype == torch.float64
    assert TASK.metrics(0.0, counts) == {"perplexity": 1.0}


def test_counts_of_parts_are_those_of_the_whole():
    task, generator = Classification(3), torch.Generator().manual_seed(0)
    output = torch.randn(60, 3, generator=generator, requires_grad=True)
    target = torch.randint(3, (60,), generator=generator)
    target[50:] = IGNORE
    counts = task.observe(output, target)
    assert counts.dtype == torch.float64
    assert counts[1:4].sum() == counts[4:].sum() == task.num_valid(target) == 50
    parts = [task.observe(o, t) for o, t in zip(output.split(7), target.split(7), strict=True)]
    assert torch.equal(torch.stack(parts).sum(0), counts)
    seen = [(int(o.argmax()), int(t)) for o, t in zip(output[:50], target[:50], strict=True)]
    assert counts[0] == sum(predicted == label for predicted, label in seen)
    for each in range(3):
        assert counts[1 + each] == sum(label == each for _, label in seen)
        assert counts[4 + each] == sum(predicted == each for predicted, _ in seen)
    expected = functional.cross_entropy(output, target, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(task.loss_sum(output, target), expected)


def test_accuracy_and_matthews():
    tp, tn, fp, fn = 3, 6, 2, 1
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    metrics = Classification(2).metrics(0.5, torch.tensor([9.0, 8, 4, 7, 5], dtype=torch.float64))
    assert metrics == {"accuracy": 9 / 12, "matthews": pytest.approx(expected, rel=1e-15)}


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_matthews_is_that_of_scikit_learn(classes):
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(classes)
    label = torch.randint(classes, (500,), generator=generator)
    guess = torch.randint(classes, (500,), generator=generator)
    guess[:200] = label[:200]
    counts = Classification(classes).observe(functional.one_hot(guess, classes).float(), label)
    got = Classification(classes).metrics(0.0, counts)
    assert got["matthews"] == pytest.approx(sklearn_metrics.matthews_corrcoef(label, guess), rel=1e-12)
    assert got["accuracy"] == sklearn_metrics.accuracy_score(label, guess)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[5, 0], [0, 7]], 1.0),
        ([[0, 5], [7, 0]], -1.0),
        ([[5, 0], [7, 0]], 0.0),
        ([[5, 7], [0, 0]], 0.0),
        ([[10**9, 0, 0], [0, 10**9, 0], [0, 0, 1]], 1.0),
    ],
)
def test_matthews_at_its_ends(rows, expected):
    labelled, predicted = [sum(row) for row in rows], [sum(column) for column in zip(*rows, strict=True)]
    assert matthews(sum(row[label] for label, row in enumerate(rows)), labelled, predicted) == expected


def test_a_model_may_have_more_outputs_than_there_are_classes():
    """Counts were as long as the largest prediction of a micro-batch, and did not add up."""
    task, target = Classification(2), torch.tensor([0, 1, 1, 0])
    output = functional.one_hot(torch.tensor([0, 1, 3, 4]), 6).float()
    counts = sum(task.observe(o, t) for o, t in zip(output.split(2), target.split(2), strict=True))
    assert task.metrics(0.0, counts) == {"accuracy": 0.5, "matthews": matthews(2, [2, 2, 0, 0], [1, 1, 1, 1])}
    assert task.observe(output[:, :1], target).shape == (5,), "as those of a loss of one's own may be"


def test_no_samples_have_no_metrics():
    metrics = Classification(2).metrics(0.0, torch.zeros(5, dtype=torch.float64))
    assert all(math.isnan(value) for value in metrics.values()), metrics


def test_the_counts_of_many_classes_take_the_memory_of_a_few_rows():
    task = Classification(100_000)
    counts = task.observe(torch.zeros(1, 100_000), torch.tensor([7]))
    assert counts.shape == (200_001,)
    assert task.metrics(0.0, counts) == {"accuracy": 0.0, "matthews": 0.0}


def test_one_class_cannot_be_told_apart():
    with pytest.raises(ModelError, match="num_labels must be from 2 to 1000000, got 1"):
        Classification(1)


OWN = """
def squares(output, target):
    valid = target != -100
    return (output[..., 0][valid] - target[valid]).square().sum()


def right(output, target):
    return (output.argmax(-1) == target).sum()


def words(output, target):
    return "none"


PERPLEXITY = 3
"""


def test_a_loss_and_metrics_of_ones_own(monkeypatch):
    add_module(monkeypatch, "own_loss", OWN)
    task = own_task(TASK, "own_loss:squares", ["own_loss:right"])
    output, target = torch.zeros(2, 2, 3), torch.tensor([[0, 2], [IGNORE, 1]])
    output[..., 2] = 1
    assert task.loss_sum(output, target) == 5
    assert (task.unit, task.scores, task.num_valid(target)) == (TASK.unit, (*TASK.scores, "right"), 3)
    counts = sum(task.observe(output[row], target[row]) for row in range(2))
    assert task.metrics(0.0, counts) == {"perplexity": 1.0, "right": 1 / 3}
    assert own_task(task, None, []) is TASK
    assert own_task(TASK, None, ["own_loss:right"]).loss_sum(output, target) == TASK.loss_sum(output, target)


@pytest.mark.parametrize(
    ("loss", "metrics", "said"),
    [
        ("own_loss:PERPLEXITY", [], "own_loss:PERPLEXITY must be a function of output and targets, got int"),
        (None, ["own_loss:right", "own_loss:right"], "must have names of their own"),
        ("own_loss:nothing", [], "training.loss: module own_loss has no 'nothing'"),
    ],
)
def test_what_is_no_loss_of_ones_own(monkeypatch, loss, metrics, said):
    add_module(monkeypatch, "own_loss", OWN)
    with pytest.raises(ModelError, match=said):
        own_task(TASK, loss, metrics)


def test_a_loss_of_ones_own_is_not_written_out_where_it_fits(monkeypatch):
    """It was, for a sentence that nobody read: on a GPU each micro-batch waited for its loss."""
    add_module(monkeypatch, "own_loss", OWN)
    task = own_task(TASK, "own_loss:squares", [])
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda loss: pytest.fail("the loss is written out"))
    assert task.loss_sum(torch.zeros(1, 3, 2), torch.ones(1, 3)) == 3


def test_a_loss_of_ones_own_must_be_a_number(monkeypatch):
    add_module(monkeypatch, "own_loss", OWN)
    task = own_task(TASK, "own_loss:words", [])
    with pytest.raises(ModelError, match=r"the loss own_loss\.words must be a tensor of one number, got 'none'"):
        task.loss_sum(torch.zeros(1, 3), torch.zeros(1))
