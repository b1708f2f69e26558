"""Links in memory that behave as a network: frames are copied late, and channels overtake each other.

A `Link` has both ends of a channel, in place of `MemoryEnd`. A frame stays in the sender's buffer until the network
delivers it into a buffer that the receiver has posted, as with gloo: a shorter frame leaves the rest of that buffer as
it was. Frames of one channel stay in order. Everything else is drawn.
"""

from collections import deque
from dataclasses import dataclass

from thinwire.pipeline.errors import PeerError
from thinwire.pipeline.processes.transport import Pool, ReceivingEnd

DAMAGES = ("cut", "flipped", "noise", "twice", "lost", "swapped", "replayed", "misrouted", "closed", "silent")
"""What may happen to a frame; each of these is told, or changes nothing."""


@dataclass
class Frame:
    """A frame under way."""

    link: "Link"
    buffer: object
    nbytes: int
    damage: str | None = None


class Network:
    """All links of a process.

    Args:
        process: the one that may end at each call of a link.
        draw: gives what arrives when, and the damage's places.
        damages: what happens to a frame, by its number from 1 in the order of sending.
    """

    def __init__(self, process, draw, damages):
        self.process, self._draw, self._damages = process, draw, damages
        self._links = []
        self.frames = 0

    def link(self, capacity, *, pinned=False):
        """A link for one channel, in place of `MemoryEnd`."""
        self._links.append(Link(self, capacity))
        return self._links[-1]

    def add(self, link, buffer, nbytes):
        """A frame is sent."""
        self.frames += 1
        link.under_way.append(Frame(link, buffer, nbytes, self._damages.get(self.frames)))
        if link.under_way[-1].damage in ("closed", "silent"):
            link.state = link.under_way[-1].damage
        elif len(link.under_way) > 1 and link.under_way[-2].damage == "swapped":
            link.under_way[-2], link.under_way[-1] = link.under_way[-1], link.under_way[-2]

    def let_arrive(self, link):
        """Let frames of any links arrive, until `link` is idle or one of its own has; whether it has."""
        while link.under_way and link.state != "silent":
            busy = [one for one in self._links if one.under_way and one.posted and one.state is None]
            if link not in busy:
                return False
            chosen = self._draw.choice(busy)
            self._deliver(chosen.under_way.popleft())
            if chosen is link:
                return True
        return False

    def _deliver(self, frame):
        link, damage, content = frame.link, frame.damage, frame.buffer[: frame.nbytes].clone()
        if damage == "lost":
            return
        if damage == "replayed" and link.last is not None:
            content = link.last
        elif damage == "misrouted":
            link = self._draw.choice([one for one in self._links if one.posted])
            if len(content) > link.capacity:  # gloo ends the process
                self.process.end()
        elif damage == "cut":
            content = content[: self._draw.randrange(len(content))]
        elif damage == "flipped":
            for _ in range(self._draw.randint(1, 3)):
                content[self._draw.randrange(len(content))] ^= 1 << self._draw.randrange(8)
        elif damage == "noise":
            start = self._draw.randrange(len(content))
            for place in range(start, min(len(content), start + 20)):
                content[place] = self._draw.randrange(256)
        elif damage == "twice":
            link.under_way.appendleft(Frame(link, content, len(content)))
        frame.link.last = content
        link.arrive(content)


class Link(ReceivingEnd):
    """Both ends of a channel."""

    def __init__(self, network, capacity):
        self.capacity, self._network, self._process = capacity, network, network.process
        self._free, self._lent = Pool(capacity), Pool(capacity)
        self._sent = []
        self.under_way, self.posted, self._arrived = deque(), deque(), deque()
        self.state = self.last = None

    def take(self):
        self._process.moment()
        return self._free.take()

    def send(self, buffer, nbytes, what, seal):
        nbytes = seal(buffer, nbytes)
        self._process.moment()  # encoded, and not sent
        self._require_open(what)
        self._network.add(self, buffer, nbytes)
        self._sent.append(buffer)
        self._process.moment()  # sent, and the buffers of feedback not yet updated

    def flush(self):
        self._process.moment()
        while self._network.let_arrive(self):
            pass
        self._require_open("waiting for frames to leave")
        if self.state == "silent":
            raise PeerError("waiting for frames to leave: the other end was silent")
        for buffer in self._sent:
            self._free.give(buffer)
        self._sent.clear()

    def post(self, count, what):
        for _ in range(count):
            self.posted.append(self._lent.take())

    def receive(self, what):
        self._process.moment()
        while not self._arrived and self._network.let_arrive(self):
            pass
        self._require_open(what)
        if not self._arrived:
            raise PeerError(f"{what}: no frame came in time")
        return self._arrived.popleft()

    def give(self, buffer):
        self._lent.give(buffer)
        self._process.moment()  # decoded

    def arrive(self, content):
        """Put a frame into the oldest posted buffer."""
        buffer = self.posted.popleft()
        buffer[: len(content)] = content
        self._arrived.append(buffer)

    def _require_open(self, what):
        if self.state == "closed":
            raise PeerError(f"{what}: the connection was closed")
