"""A membership server without a network, and a clock that a test moves."""

from thinwire.pipeline.replicas.membership.messages import pack, unpack
from thinwire.pipeline.replicas.membership.server import Server, Size


class World:
    """A server, with what it sent to whom; `now` is its clock. Launchers and processes are numbers on its network."""

    def __init__(self, processes=1, replicas=2):
        self.now, self.sent, self.told, self.forgotten, self._heard = 0.0, {}, [], set(), {}
        size = Size(replicas=replicas, processes=processes, timeout=10.0, silence=6.0)
        self.server = Server(size, {}, self.told.append, lambda: self.now)
        self.server.network = self

    def give(self, peer, data):
        self.sent.setdefault(peer, []).append(unpack(data)[0])

    def silence(self, peer):
        return self.now - self._heard[peer]

    def forget(self, peer):
        self.forgotten.add(peer)

    def say(self, peer, kind, blobs=(), **words):
        self.say_bytes(peer, pack({"kind": kind, **words}, blobs))

    def say_bytes(self, peer, data):
        self._heard[peer] = self.now
        self.server.take(peer, data)

    def answers(self, peer):
        """The last message to a process, and its kind."""
        words = self.sent[peer][-1]
        return words["kind"], words

    def greet(self, peer, replica, agreed=()):
        """What a launcher gets that says which replica is its own."""
        self.say(peer, "launcher", replica=replica, agreed=dict(agreed))
        return self.answers(peer)

    def enter(self, peer, replica, life="life"):
        """Let a launcher come, and its replica start."""
        assert self.greet(peer, replica)[0] == "welcome"
        self.say(peer, "comes", replica=replica, life=f"{life} {replica}")

    def begin(self, peer, replica, process=0, life="life"):
        self.say(peer, "begin", replica=replica, process=process, life=f"{life} {replica}", held=0, digest="x")

    def wait(self, seconds, *heard):
        """Let time pass; these processes are heard all the time."""
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self._heard |= dict.fromkeys(heard, self.now)
            self.server.look()
