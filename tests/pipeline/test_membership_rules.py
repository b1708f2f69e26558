"""The rules of membership, without processes: who takes part, who goes on, who takes the weights of another."""

import pytest

from thinwire.pipeline.replicas.membership.rules import Membership

TIMEOUT = 10.0


class World:
    """The rules of replicas with two processes each, with what it said; `now` is its clock."""

    def __init__(self, replicas=2):
        self.now, self.answers, self.told = 0.0, {}, []
        self.rules = Membership(replicas, 2, TIMEOUT, self._answer, self.told.append, lambda: self.now)
        for replica in range(replicas):
            self.rules.comes(replica)

    def _answer(self, replica, process, words, blobs):
        self.answers[replica, process] = words, blobs

    def begin(self, replica, held=0, digest="x"):
        for process in range(2):
            self.say(replica, process, {"kind": "begin", "held": held, "digest": digest})

    def begin_at_end(self, replica, held, digest="x"):
        """Say what a replica says that has done all steps: with its weights."""
        for process in range(2):
            words = {"kind": "end", "held": held, "digest": digest, "step": held, "passes": {}}
            self.say(replica, process, words, [f"weights of {replica}.{process}".encode()])

    def deliver(self, replica, step, processes=(0, 1), samples=4, last=False):
        for process in processes:
            words = {"kind": "deliver", "step": step, "samples": samples, "last": last}
            self.say(replica, process, words, [f"{replica}.{process} after {step}".encode()])

    def apply(self, replica, step, digest="x", last=False):
        """Say what a replica says after an exchange: with its weights if it was asked for them."""
        for process in range(2):
            gives = self.answers[replica, process][0]["gives"]
            words = {"kind": "applied", "step": step, "digest": digest, "passes": {process: {"train": 7}}, "last": last}
            self.say(replica, process, words, [f"weights of {replica}.{process}".encode()] if gives else [])

    def say(self, replica, process, words, blobs=()):
        self.rules.received(replica, process, (words, list(blobs)))

    def given_to(self, replica):
        """The answer to process 1 of a replica that comes back: its kind, step and blobs."""
        self.rules.comes(replica)
        self.forget()
        self.begin(replica)
        words, blobs = self.answers[replica, 1]
        return words["kind"], words["step"], blobs

    def wait(self, seconds):
        self.now += seconds
        self.rules.settle()

    def heard(self, replica):
        """The kind of the last answer to all processes of a replica, which is forgotten; None without one."""
        kinds = {self.answers[key][0]["kind"] for key in list(self.answers) if key[0] == replica}
        assert len(kinds) <= 1
        return kinds.pop() if kinds else None

    def forget(self):
        self.answers = {}

    def exchange(self, step, *replicas):
        """An exchange in which these take part."""
        self.forget()
        for replica in replicas:
            self.deliver(replica, step)
        for replica in replicas:
            assert self.heard(replica) == "exchange"
            self.apply(replica, step, f"after {step}")


@pytest.fixture
def world():
    """Two replicas that train."""
    world = World()
    world.begin(0)
    assert world.heard(0) is None, "it waits for the other one: that may have newer weights"
    world.begin(1)
    assert world.heard(0) == world.heard(1) == "go"
    world.forget()
    return world


def test_all_get_the_frames_of_all_others(world):
    world.deliver(0, 3, samples=12)
    world.deliver(1, 3, processes=[0], samples=4)
    assert not world.answers, "one process has not delivered yet"
    world.deliver(1, 3, processes=[1], samples=4)
    words, blobs = world.answers[0, 1]
    assert words["samples"] == {0: 12, 1: 4} and words["others"] == [1] and not words["gives"]
    assert blobs == [b"1.1 after 3"]
    assert world.answers[1, 0][1] == [b"0.0 after 3"]
    assert world.told == []


def test_a_lost_replica_does_not_stop_the_others(world):
    world.deliver(0, 3)
    world.deliver(1, 3, processes=[0])
    world.rules.loses(1, for_good=False)
    assert world.answers[0, 0][0]["samples"] == {0: 4}
    assert world.told == ["the exchange after step 3 goes on with 1 of 2 replicas, without replica 1"]
    world.apply(0, 3)
    world.exchange(6, 0)
    assert len(world.told) == 1, "it is said once"


def test_what_a_lost_replica_delivered_does_not_count():
    world = World(3)
    for replica in range(3):
        world.begin(replica)
    world.forget()
    world.deliver(2, 3)
    world.rules.loses(2, for_good=False)
    world.deliver(0, 3)
    assert not world.answers
    world.deliver(1, 3)
    assert world.answers[0, 0][0]["samples"] == {0: 4, 1: 4}


def test_one_that_returns_takes_the_weights_at_the_next_exchange(world):
    world.exchange(3, 0, 1)
    world.rules.loses(1, for_good=False)
    world.rules.comes(1)
    world.exchange(6, 0)
    world.forget()
    world.begin(1, held=3, digest="after 3")
    assert world.heard(1) is None
    world.deliver(0, 9)
    assert world.heard(0) == "exchange", "one that waits is not waited for"
    world.apply(0, 9, "after 9")
    words, blobs = world.answers[1, 1]
    assert (words["kind"], words["step"], words["giver"]) == ("take", 9, 0)
    assert words["passes"] == {0: {"train": 7}, 1: {"train": 7}}
    assert blobs == [b"weights of 0.1"]
    world.exchange(12, 0, 1)
    assert world.told == [
        "the exchange after step 6 goes on with 1 of 2 replicas, without replica 1",
        "replica 1 is back: it took the weights of replica 0 after step 9",
        "the exchange after step 12 goes on with 2 of 2 replicas again",
    ]


def test_one_that_returns_in_time_goes_on_from_its_checkpoint(world):
    world.exchange(3, 0, 1)
    world.rules.loses(1, for_good=False)
    world.rules.comes(1)
    world.forget()
    world.begin(1, held=3, digest="after 3")
    assert world.heard(1) == "go"
    world.exchange(6, 0, 1)
    assert world.told == []


def test_weights_of_another_history_are_not_current(world):
    """Its step is that of the current ones, but others took part in that exchange."""
    world.rules.loses(1, for_good=False)
    world.rules.comes(1)
    world.exchange(3, 0)
    world.begin(1, held=3, digest="others")
    assert world.heard(1) is None


def test_a_late_replica_takes_the_weights_at_the_next_exchange(world):
    world.deliver(0, 3)
    world.deliver(1, 3, processes=[0])
    world.wait(TIMEOUT - 1)
    assert not world.answers
    world.wait(1)
    assert world.heard(0) == "exchange"
    world.apply(0, 3, "after 3")
    world.deliver(1, 3, processes=[1])
    assert world.heard(1) is None
    world.forget()
    world.deliver(0, 6)
    world.apply(0, 6, "after 6")
    assert world.heard(1) == "take"
    world.exchange(9, 0, 1)


def test_another_one_gives_if_the_giver_is_lost():
    world = World(3)
    for replica in range(3):
        world.begin(replica)
    world.rules.loses(2, for_good=False)
    world.rules.comes(2)
    world.exchange(3, 0, 1)
    world.begin(2)
    world.forget()
    world.deliver(0, 6)
    world.deliver(1, 6)
    assert world.answers[0, 0][0]["gives"] and not world.answers[1, 0][0]["gives"]
    world.rules.loses(0, for_good=True)
    world.apply(1, 6)
    assert world.heard(2) is None
    world.forget()
    world.deliver(1, 9)
    world.apply(1, 9)
    assert world.heard(2) == "take"
    assert world.answers[2, 0][0]["giver"] == 1


def test_who_comes_after_the_last_exchange_takes_the_weights_of_the_end(world):
    world.deliver(0, 3, last=True)
    world.wait(TIMEOUT)
    world.apply(0, 3, last=True)
    world.rules.loses(0, for_good=True)
    world.deliver(1, 3, last=True)
    assert world.heard(1) == "take"


def test_who_is_lost_after_the_last_exchange_takes_the_weights_of_the_end(world):
    """It went on from its checkpoint alone, and its last weights differed from those of the others."""
    for act in (world.deliver, world.apply):
        for replica in range(2):
            act(replica, 3, last=True)
    world.rules.loses(0, for_good=False)
    world.rules.loses(1, for_good=True)
    assert world.given_to(0) == ("take", 3, [b"weights of 0.1"])


def test_the_weights_of_the_end_are_kept_whoever_is_lost_after_the_last_exchange(world):
    """One replica was to give them. It was lost before it did, and ended with other weights than the others."""
    for replica in range(2):
        world.deliver(replica, 3, last=True)
    world.rules.loses(0, for_good=False)
    world.apply(1, 3, last=True)
    world.rules.loses(1, for_good=True)
    assert world.given_to(0) == ("take", 3, [b"weights of 1.1"])


def test_a_replica_that_had_ended_gives_its_weights_to_those_that_start_again_with_it():
    """It ended at once, and the others went on from older weights and ended with other ones."""
    world = World()
    world.begin(0, held=3, digest="after 3")
    assert world.heard(0) is None
    world.begin_at_end(1, held=6)
    assert world.heard(1) == "go"
    words, blobs = world.answers[0, 1]
    assert (words["kind"], words["step"], words["giver"], blobs) == ("take", 6, 1, [b"weights of 1.1"])


def test_if_nobody_trains_the_newest_weights_go_on(world):
    world.exchange(3, 0, 1)
    world.exchange(6, 0, 1)
    for replica in range(2):
        world.rules.loses(replica, for_good=False)
        world.rules.comes(replica)
    world.forget()
    world.begin(0, held=0)
    assert world.heard(0) is None
    world.begin(1, held=3, digest="after 3")
    assert world.heard(0) is None and world.heard(1) == "go"
    assert world.told == ["no replica has the weights after step 6 any more: the run goes on with those after step 3"]
    world.deliver(1, 6)
    world.apply(1, 6)
    assert world.heard(0) == "take"


def test_the_start_does_not_wait_for_ever():
    world = World()
    world.begin(1)
    world.wait(TIMEOUT)
    assert world.heard(1) == "go"
    world.begin(0)
    assert world.heard(0) == "go", "it holds the same weights"


def test_different_weights_after_an_exchange_stop_the_run(world):
    world.deliver(0, 3)
    world.deliver(1, 3)
    world.apply(0, 3, "one")
    world.deliver(0, 6)
    world.apply(1, 3, "other")
    assert world.heard(0) == "failed"
    assert "the weights of replica 1 after the exchange of step 3 differ" in world.answers[0, 0][0]["text"]
    world.forget()
    world.deliver(1, 6)
    assert world.heard(1) == "failed"


def test_weights_that_a_late_replica_had_before_are_compared_with_nobodys(world):
    """All others were lost and went on from older weights. Its word of an exchange of the same step stopped the run."""
    for step in (3, 6):
        world.deliver(0, step)
        if step == 3:
            world.deliver(1, step)
        else:
            world.wait(TIMEOUT)
        world.apply(0, step, f"after {step}")
    world.rules.loses(0, for_good=False)
    world.rules.comes(0)
    world.begin(0)
    world.wait(TIMEOUT)
    assert world.heard(0) == "go", "the late one says nothing"
    world.deliver(0, 3)
    world.apply(1, 3, "after 3")
    world.apply(0, 3, "after 3, alone")
    world.exchange(6, 0)


def test_all_stop_after_the_same_exchange(world):
    world.rules.loses(1, for_good=False)
    world.rules.comes(1)
    world.exchange(3, 0)
    world.begin(1)
    world.rules.stop()
    world.forget()
    world.deliver(0, 6)
    assert world.answers[0, 0][0]["stop"]
    world.apply(0, 6)
    assert world.heard(1) == "take" and world.answers[1, 0][0]["stop"]


def test_one_stops_alone_and_may_come_again(world):
    world.rules.stop(1)
    world.deliver(0, 3)
    world.deliver(1, 3)
    assert [world.answers[replica, 0][0]["stop"] for replica in range(2)] == [False, True]
    world.rules.loses(1, for_good=True)
    world.exchange(6, 0)
    world.rules.comes(1)
    world.begin(1, 3)
    world.deliver(0, 9)
    world.apply(0, 9)
    assert world.heard(1) == "take" and not world.answers[1, 0][0]["stop"]


def test_who_waits_for_weights_is_told_that_all_others_have_stopped(world):
    world.exchange(3, 0, 1)
    for replica in range(2):
        world.rules.loses(replica, for_good=replica == 0)
    world.rules.comes(1)
    world.forget()
    world.rules.stop()
    world.begin(1)
    assert world.heard(1) == "stopped"
