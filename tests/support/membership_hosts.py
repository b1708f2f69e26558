"""A membership server on loopback, and the launchers and stage processes that reach it, in one process."""

import os
import time
from contextlib import contextmanager

from thinwire.launch.run.elastic.agent import AgentSettings, LauncherClient
from thinwire.pipeline.processes.zeromq.keys import Keys
from thinwire.pipeline.replicas.membership.attendance import Attendance
from thinwire.pipeline.replicas.membership.client import PIECE_BYTES, Client
from thinwire.pipeline.replicas.membership.listening import listen
from thinwire.pipeline.replicas.membership.messages import ANSWERED
from thinwire.pipeline.replicas.membership.server import Size

TIMEOUT = 60.0
LONG = os.urandom(3 * PIECE_BYTES + 1)


class Host:
    """A launcher and the stage process of its replica."""

    living = []

    def __init__(self, settings):
        self.replica, self.life = settings.replica, os.urandom(4).hex()
        self.launcher = LauncherClient(settings)
        self.launcher.send({"kind": "comes", "replica": self.replica, "life": self.life})
        keys = Keys.of(self.launcher.secret.encode())
        self.client = Client(settings.place, keys, settings.heartbeat, settings.timeout, ANSWERED)
        self.attendance = Attendance(self.client, self.replica, 0, self.life)
        Host.living += [self.client, self.launcher.client]

    def exchange(self, step, frame, last=False):
        return self.attendance.exchange(step, 4, [frame], last=last)

    def gives(self, state, step=1):
        self.attendance.applied(step, "x", {}, state, last=True)

    def leave(self):
        """End as a replica does that is done: first its process, then its launcher; why there was no server, if so."""
        self.attendance.close(lambda text: None)
        self.launcher.send({"kind": "loses", "replica": self.replica, "life": self.life, "for_good": True})
        time.sleep(0.1)
        self.launcher.client.close()
        return self.launcher.client.ending

    def ending(self, client=None):
        """Why there is no server for its launcher, or for another client, once that is so."""
        client, deadline = client or self.launcher.client, time.monotonic() + TIMEOUT
        while client.ending is None:
            assert time.monotonic() < deadline, "it goes on"
            time.sleep(0.01)
        return client.ending


class Serving:
    """A membership server of two replicas with a process each, at a free port."""

    def __init__(self, keys, port="*", largest=1 << 20):
        self.told = []
        size = Size(replicas=2, processes=1, timeout=TIMEOUT, silence=TIMEOUT)
        agreed = {"model.name": '"gpt2"'}
        self.server, self.mesh = listen("127.0.0.1", port, keys, size, agreed, largest, self.told.append)

    def wait_for(self, *texts):
        """Wait until the user was told these sentences."""
        deadline = time.monotonic() + TIMEOUT
        while not set(texts) <= set(self.told):
            assert time.monotonic() < deadline, self.told
            time.sleep(0.01)


@contextmanager
def serving(folder):
    """A membership server, and the settings of the launcher of replica 0."""
    Keys.fresh().write(folder / "keys")
    server = Serving(Keys.read(folder / "keys"))
    agreed = {"model.name": '"gpt2"', "the samples of training": "abc"}
    yield server, AgentSettings(2, 1, TIMEOUT, TIMEOUT, server.mesh.place, str(folder / "keys"), 0, agreed)
    for client in Host.living:
        client._mesh.close()
    Host.living = []
    server.mesh.close()
