from dataclasses import replace
from types import SimpleNamespace

import pytest

from thinwire.launch.bench.links import results
from thinwire.launch.bench.links.results import REFERENCE, Contest, as_document, simulated
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.run.recipe import parse
from thinwire.launch.shared.tables import Table
from thinwire.launch.timing.exchange_time import loads
from thinwire.launch.timing.step_time import ChannelTiming, Compute, time_step
from thinwire.launch.timing.timetable import timetable
from thinwire.pipeline.measuring.meters import SECTIONS
from thinwire.pipeline.measuring.probe import LinkSpeed
from thinwire.pipeline.options import ReplicaOptions

COMPUTE = {"forward": 0.02, "backward": 0.04, "optimizer": 0.005}
MICROBATCHES = 4


@pytest.fixture(scope="module")
def prepared():
    """Two stages, four micro-batches of one sample."""
    config = '{"vocab_size": 256, "n_layer": 2, "n_embd": 8, "n_head": 1, "n_positions": 16}'
    options = ["--model.config", config, "--data.block_size", "16", "--data.limit", "5000"]
    cut = ["--pipeline.num_stages", "2", "--pipeline.num_microbatches", "4", "--pipeline.microbatch_size", "1"]
    return prepare(parse(["quickstart", *options, *cut], prog="thinwire bench"))


def step(process, seconds, codec_seconds, frame_bytes):
    """What a process says of a step; none of it, of plain torch."""
    if codec_seconds is None:
        return {"seconds": seconds, "sections": {}, "compute": [], "frames": [], "exchange": {}}
    channel = ("activations", "gradients")[process]
    return {
        "seconds": seconds + process / 1000,
        "sections": {
            **dict.fromkeys(SECTIONS, 0.0),
            **{"compute": 0.2, "encode": codec_seconds, "wire": 0.1, "decode": codec_seconds / 2},
        },
        "compute": [[process, task, spent] for task, spent in COMPUTE.items()],
        "frames": [[0, channel, MICROBATCHES, MICROBATCHES * frame_bytes]],
        "exchange": {},
    }


def contest(bandwidth, goodput, times):
    """A contest where `times` gives each contender's (first, later seconds, codec seconds, bytes of a frame)."""
    processes = [
        {
            "links": [
                {"source": 0, "target": 1, "goodput": goodput, "latency": 0.001, "duplex": 0.9},
                {"source": 1, "target": 0, "goodput": goodput, "latency": 0.001, "duplex": 0.9},
            ],
            "turns": [
                {
                    "contender": name,
                    "new": True,
                    "first": step(process, first, codec, size),
                    "later": [step(process, later + noise, codec, size) for noise in (0.0, 0.01, -0.01)],
                }
                for name, (first, later, codec, size) in times.items()
            ],
        }
        for process in range(2)
    ]
    return Contest(bandwidth, processes)


TIMES = {
    REFERENCE: (0.9, 0.8, 0.004, 100_000),
    "aqsgd(q(4))/q(8)": (0.8, 0.4, 0.02, 20_000),
    "torch fp32": (1.1, 1.0, None, None),
}


def test_medians_are_of_the_slowest_process():
    found = contest(100.0, 1e7, TIMES)
    assert found.contenders == list(TIMES)
    assert found.seconds(REFERENCE) == pytest.approx(0.801)
    assert found.seconds(REFERENCE, "first") == pytest.approx(0.901)
    assert found.seconds("torch fp32") == pytest.approx(1.0)
    assert found.compute() == {(stage, task): spent for stage in range(2) for task, spent in COMPUTE.items()}
    assert found.frames("torch fp32") == {} and found.sections("torch fp32") == [{}, {}]
    assert found.frames(REFERENCE)[0, "gradients"] == (4, 400_000)


def test_compute_is_that_of_the_contender_slowed_least():
    found = contest(100.0, 1e7, TIMES)
    for turn in found.processes[1]["turns"][:1]:
        for slowed in turn["later"]:
            slowed["compute"] = [[1, task, 2 * spent] for task, spent in COMPUTE.items()]
    assert found.compute() == {(stage, task): spent for stage in range(2) for task, spent in COMPUTE.items()}


@pytest.mark.slow
def test_the_limit_is_the_recurrence_at_the_measured_goodput(prepared):
    """GPipe over two stages, the wire (10 ms and 1 ms of latency) faster than compute.

    Forward: the last stage starts 31 ms late and computes 4 x 20 ms. Back: the first stage's last gradient comes
    10 + 1 ms after the last stage's 4 x 40 ms, and it has 40 ms to compute. Then the optimizer.
    """
    found = contest(100.0, 1e7, TIMES)
    limit = simulated(found, prepared, free_codecs=True)
    assert limit[REFERENCE] == pytest.approx(0.031 + 4 * 0.02 + 4 * 0.04 + 0.011 + 0.04 + 0.005)
    assert set(limit) == {REFERENCE, "aqsgd(q(4))/q(8)"}
    predicted = simulated(found, prepared, free_codecs=False)
    # a frame is encoded in 1 ms and decoded in half of it: the last one arrives after 4 x 21 + 11 ms
    assert predicted[REFERENCE] == pytest.approx(0.095 + 0.0205 + 4 * 0.041 + 0.011 + 0.0405 + 0.005)


def test_a_slow_link_is_the_limit(prepared):
    found = contest(1.0, 1e5, TIMES)
    limit = simulated(found, prepared, free_codecs=True)
    assert limit[REFERENCE] == pytest.approx(0.02 + 4 * 1.0 + 0.001 + 0.02 + 0.04 + 4 * 1.0 + 0.001 + 0.04 + 0.005)


@pytest.mark.parametrize(("available", "said"), [(1, " here 2 processes shared 1."), (2, "measured seconds.")])
def test_a_table_says_if_processes_shared_cores(prepared, monkeypatch, available, said):
    monkeypatch.setattr(results, "cores", lambda: available)
    found = as_document([contest(None, 1e9, TIMES)], prepared, {}, {})
    assert found["tables"][0]["note"].endswith(said)


def test_tables_hold_ratios_of_what_was_measured(prepared):
    found = as_document([contest(None, 1e9, TIMES), contest(100.0, 1e7, TIMES)], prepared, {}, {"command": "c"})
    assert found["command"] == "c"
    speeds, sections, visits, conditions = map(Table.from_json, found["tables"])
    by_name = {(row[0], row[1]): dict(zip(speeds.columns, row, strict=True)) for row in speeds.rows}
    row = by_name["100 Mbit/s", "aqsgd(q(4))/q(8)"]
    assert row["samples/s"] == pytest.approx(4 / 0.401)
    assert row["x none"] == pytest.approx(0.801 / 0.401)
    assert row["of unshaped"] == pytest.approx(0.801 / 0.401)
    assert row["of LIMIT"] == pytest.approx(row["samples/s"] / row["LIMIT"])
    assert row["MB a step"] == pytest.approx(0.16)
    assert by_name["unshaped", "torch fp32"]["LIMIT"] is None
    assert len(speeds.rows) == 6 and len(sections.rows) == 8
    assert visits.rows[1] == [
        *("100 Mbit/s", "aqsgd(q(4))/q(8)"),
        *(pytest.approx(4 / seconds) for seconds in (0.801, 0.401, (0.801 + 9 * 0.401) / 10)),
    ]
    assert conditions.rows[1] == ["100 Mbit/s", *map(pytest.approx, (80.0, 0.9, 1.0, 20.0, 40.0, 5.0, 20.0, 40.0, 5.0))]
    assert [contest["bandwidth"] for contest in found["measured"]] == [None, 100.0]


def test_the_published_speed_ups_stand_beside_ours(prepared):
    times = {REFERENCE: (0.9, 0.8, 0.004, 100_000), "q(4)/q(8)": (0.4, 0.2, 0.02, 20_000)}
    contests = [contest(None, 1e9, times), contest(9.0, 1e6, times)]
    found = as_document(contests, prepared, {100e6: 11.6}, {})
    beside = Table.from_json(found["tables"][2])
    assert beside.rows == [[100, 11.6, "q(4)/q(8)", pytest.approx(3.0 / 0.5), pytest.approx(0.801 / 0.201)]]


@pytest.mark.parametrize(("most", "adds"), [(1.0, 0.3), (None, 0.259)])
def test_an_optimizer_waits_for_other_processes_only_if_gradients_are_clipped(prepared, most, adds):
    """The last stage is done 41 ms before the first: a backward of 40 ms, and a latency."""
    recipe = replace(prepared.recipe, optimizer=replace(prepared.recipe.optimizer, max_grad_norm=most))
    one = contest(100.0, 1e12, {REFERENCE: (1.0, 1.0, 0.0, 0)})
    [before] = simulated(one, prepared, free_codecs=True).values()
    for turn in one.processes[1]["turns"]:
        for taken in (turn["first"], *turn["later"]):
            taken["compute"] = [*taken["compute"][:2], [1, "optimizer", 0.305]]
    [after] = simulated(one, replace(prepared, recipe=recipe), free_codecs=True).values()
    assert after - before == pytest.approx(adds)


@pytest.mark.slow
def test_the_limit_of_replicas_adds_the_exchange_over_the_measured_links(prepared):
    """Two pipelines; the links between replicas are ten times slower than those between stages."""
    recipe = replace(prepared.recipe, replicas=ReplicaOptions(count=2, gradients="ef(q(4))"))
    replicas = replace(prepared, recipe=recipe)
    one = contest(100.0, 1e7, {"q(4)/q(8), replicas ef(q(4))": TIMES[REFERENCE]})
    processes = [dict(process) for process in (*one.processes, *one.processes)]
    links = [
        {"source": low, "target": high, "goodput": goodput, "latency": 0.001, "duplex": 1.0}
        for low, high, goodput in ((0, 1, 1e7), (2, 3, 1e7), (0, 2, 1e6), (1, 3, 1e6))
    ]
    links += [{**link, "source": link["target"], "target": link["source"]} for link in links]
    processes[0]["links"] = links
    for process in processes:
        for turn in process["turns"]:
            for taken in (turn["first"], *turn["later"]):
                taken["frames"] = [*taken["frames"][:1], [0, "parts", 1, 5000]]
    found = Contest(100.0, processes, size=2)
    assert found.frames(found.contenders[0])[0, "gradients"] == (4, 400_000)
    assert found.sent(found.contenders[0]) == 4 * (400_000 + 5000)
    [alone] = simulated(one, prepared, free_codecs=True).values()
    [limit] = simulated(found, replicas, free_codecs=True).values()
    # the first stage is done last: it sends half of its weights twice, as parts and as sums
    [load] = loads(results.replica_work(replicas, "none").elements[0], 2, "ef(q(4))")
    assert limit - alone == pytest.approx(2 * (load.longest / 1e6 + 0.001))


def added(monkeypatch, schedule, elements, spent=(), options=()):
    """What the exchange of two replicas adds to a step; a stage computes 10 ms forward and 20 ms back."""
    recipe = parse(
        [
            *("quickstart", "--pipeline.num_stages", str(len(elements)), "--pipeline.schedule", schedule),
            *("--replicas.count", "2", *options),
        ]
    )
    monkeypatch.setattr(results, "weights_of", lambda prepared: elements)
    free = ChannelTiming(nbytes=1.0)
    course = time_step(
        timetable(schedule, len(elements), recipe.pipeline.num_processes, 4),
        Compute(forward=0.01, backward=0.02),
        free,
        free,
    )
    size = recipe.pipeline.num_processes
    links = {(process, process + size): LinkSpeed(goodput=1e6, latency=0.001) for process in range(size)}
    ends = results.ends_of_processes(SimpleNamespace(recipe=recipe), course, "none", links, list(spent))
    return max(ends) - course.seconds


ROWS = 512 * 100
"""Weights of a hundred rows: 204,800 bytes, of which each of two replicas sends half twice."""


def test_a_process_exchanges_the_weights_of_all_its_stages(monkeypatch):
    """Of several stages a process, hours of measurements ended in a traceback."""
    found = added(monkeypatch, "interleaved-1f1b", (2 * ROWS, 0, ROWS, 0))
    assert found == pytest.approx(2 * ((3 * 102_400 + 64) / 1e6 + 0.001))
    spent = [{"encode": 0.3, "decode": 0.2}, {"encode": 0.0, "decode": 0.0}]
    assert added(monkeypatch, "interleaved-1f1b", (2 * ROWS, 0, ROWS, 0), spent) > found


@pytest.mark.parametrize("norm", ["1.0", "null"])
def test_no_step_of_a_bench_hides_the_exchange_of_the_one_before(monkeypatch, norm):
    """Each step ends at a barrier. The last stage is done 20 ms before the first, no matter who waits for a norm."""
    found = added(monkeypatch, "gpipe", (0, ROWS), options=["--optimizer.max_grad_norm", norm])
    assert found == pytest.approx(2 * ((102_400 + 64) / 1e6 + 0.001) - 0.02)


def test_the_steps_of_a_round_share_its_exchange(monkeypatch):
    rarely = ["--replicas.sync.every", "10"]
    spent = [{"encode": 0.3, "decode": 0.2}] * 2
    tiles = 4096 * 20
    shared = added(monkeypatch, "gpipe", (tiles, tiles), options=rarely)
    assert shared == pytest.approx(((4 * tiles + 64) / 1e6 + 0.001) / 10), "everything to the other one, at once"
    # the same seconds in each step are ten times as many in an exchange
    found, shared = (added(monkeypatch, "gpipe", (ROWS, ROWS), spent, options) for options in ((), rarely))
    assert shared > found / 5
