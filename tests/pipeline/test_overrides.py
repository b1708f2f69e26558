"""Replicas with codecs and passes of their own: a simulation equals processes, stops change nothing, mistakes."""

import pytest

from support.toy import make_trainer
from support.toy_runs import equal_to_a_simulation, stop_and_resume
from thinwire.pipeline.options import BoundaryOptions, CompressionOptions
from thinwire.pipeline.options.overrides import (
    ReplicaCodecs,
    ReplicaOverride,
    ReplicaPipeline,
    check_overrides,
    codec_in_words,
    overridden,
)

SLOW = {"activations": "aqsgd(q(4))", "gradients": 'ef(q(6, round="stochastic"))'}
OVERRIDES = {1: {"activations": "none", "gradients": 'ef21(q(4, round="stochastic"))'}}
OPTIONS = {
    "microbatches": 2,
    "microbatch_size": 1,
    "accumulation": 2,
    "dropout": 0.2,
    "replicas": 2,
    "steps": 5,
    "compression": SLOW,
    "overrides": OVERRIDES,
    "passes": (2, 1),
}


@pytest.mark.processes
def test_a_simulation_equals_the_processes_bit_for_bit(alone):
    real = equal_to_a_simulation(4, OPTIONS)
    # the first stage of each replica: from the second visit of a sample on, one of them sends differences in 4 bits
    compressed, whole = (result[2][0][0, "activations", "train"] for result in real if 0 in result[2])
    assert compressed.frames == 2 * whole.frames == 5 * 2 * 2, "of five steps with two passes, and with one"
    assert compressed.full_rows < compressed.rows and compressed.bytes < 2 * whole.bytes
    assert whole.full_rows == 0 and whole.bytes == whole.frames * 64 + whole.uncompressed


@pytest.mark.slow
def test_a_stop_of_a_simulation_changes_nothing(alone, tmp_path):
    options = OPTIONS | {"simulated": True, "steps": 8}

    def finished(trainer, first=0):
        losses = [trainer.train_step(step).loss for step in range(first, 8)]
        return losses, [stage.digests() for stage in trainer.stages]

    wanted, digests = finished(make_trainer(0, **options))
    before, _, again = stop_and_resume(tmp_path, 6, options)
    after, found = finished(again, 6)
    assert before + after == wanted
    assert found == digests
    assert any(name.startswith("replica 1 boundary 0 gradients") for name in found[0])


def test_an_override_replaces_the_codecs_of_all_boundaries_but_those_that_it_names():
    common = CompressionOptions(
        activations="q(4)", gradients="q(8)", boundaries={0: BoundaryOptions(activations="q(2)")}
    )
    codecs = ReplicaCodecs(activations="none", boundaries={1: BoundaryOptions(activations="bf16", gradients="q(6)")})
    found = overridden(common, codecs)
    pairs = [[str(found.method(boundary, name)) for name in ("activations", "gradients")] for boundary in range(3)]
    assert pairs == [["none", "q(8)"], ["bf16", "q(6)"], ["none", "q(8)"]]
    overrides = dict.fromkeys((1, 3), ReplicaOverride(compression=codecs))
    assert codec_in_words(common, overrides, 0, "activations") == "q(2), none in replicas 1 and 3"
    assert codec_in_words(common, overrides, 0, "gradients") == "q(8)"


@pytest.mark.parametrize(
    ("replica", "codecs", "said"),
    [
        (2, {}, "replicas.overrides must name replicas in 0..1 for replicas.count 2, got 2"),
        (
            1,
            {"activations": "q(99)"},
            "replicas.overrides.1: compression.activations: q's bits must be an integer from 1 to 8",
        ),
        (
            1,
            {"boundaries": {5: BoundaryOptions(activations="none")}},
            "replicas.overrides.1.compression.boundaries must lie in 0..2, got 5",
        ),
    ],
)
def test_what_cannot_work_is_one_sentence(replica, codecs, said):
    overrides = {replica: ReplicaOverride(compression=ReplicaCodecs(**codecs))}
    [mistake] = check_overrides(overrides, CompressionOptions(), replicas=2, boundaries=3)
    assert mistake.startswith(said)


def test_every_replica_has_work_in_each_step():
    overrides = {1: ReplicaOverride(pipeline=ReplicaPipeline(accumulation=0))}
    [mistake] = check_overrides(overrides, CompressionOptions(), replicas=2, boundaries=3)
    assert mistake.startswith("replicas.overrides.1.pipeline.accumulation must be at least 1, because each replica")


@pytest.mark.slow
def test_a_replica_with_passes_alone_of_its_own_shares_the_ends_of_the_others(alone):
    """A simulation counted its stores twice. The same codecs in other words have ends of their own: nothing changes."""

    def trained(codecs):
        common = {**SLOW, "activations": "ef(q(4))"}  # by position: samples of the toy change replicas
        options = OPTIONS | {"simulated": True, "compression": common, "overrides": {1: codecs}}
        trainer = make_trainer(0, **options)
        losses = [trainer.train_step(step).loss for step in range(5)]
        return losses, [len(list(stage.all_ends)) for stage in trainer.stages]

    shared, one = trained({})
    own, two = trained({"activations": 'ef(q(4, scale="absmax"))'})
    assert shared == own
    assert set(one) == {1} and set(two) == {2}
