"""`thinwire doctor --peers`: which machines of a run reach which, how fast, and what to mend where they do not.

The same command line runs on each machine. Each finds itself in the list by the addresses of its interfaces, listens
there, and calls the first machine, as processes under torchrun do. The first machine has each measure its way to each
other, one after the other, so that no two share a link; all print what was found. Beside the port of the list another
one is tried: the system chooses those of a run. A call from an address that is not in the list is hung up on.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib.metadata import version
from ipaddress import ip_address
from itertools import permutations
from typing import Any, NamedTuple

from thinwire.errors.words import listed
from thinwire.launch.doctor.calls import MACHINES, PATIENCE, SECONDS, Call, refusal, why, words
from thinwire.launch.shared.exit_codes import FailedError
from thinwire.launch.shared.probes import COMMAND_SECONDS
from thinwire.launch.shared.tables import duration_text
from thinwire.pipeline.errors import OptionsError
from thinwire.pipeline.processes.addresses import interface_addresses, listening, parted

CLOCKS = 2.0
"""Seconds by which two clocks may differ."""
PREDICTION = 600.0
"""Seconds for the prediction of a recipe."""
_WRONG = (OSError, ValueError, TypeError, KeyError)
"""What a call raises if the other end fails, or sends something else."""


class Peer(NamedTuple):
    """A machine of the list: its place as the user wrote it, its address and its port."""

    place: str
    address: str
    port: int


class Way(NamedTuple):
    """The way from one machine to another: what was measured, or else why nothing was."""

    over: str = ""
    latency: float | None = None
    """Seconds, one way: half a round trip."""
    rate: float | None = None
    """Bits a second."""
    fault: str = ""


Found = tuple[dict[tuple[int, int], Way], list[str]]
"""The ways by machine from and to, and sentences beside them."""


def resolved(places: Sequence[str]) -> list[Peer]:
    """The machines of a list. OptionsError with every place that is wrong or has no known name."""
    found, mistakes = [], []
    for place in places:
        try:
            host, port = parted(place)
            known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            address = min(known, key=lambda each: each[0] != socket.AF_INET)[4][0]  # IPv4 first, as gloo takes it
            found.append(Peer(place, str(address), port))
        except socket.gaierror as error:
            mistakes.append(f"no address is known here for {place}: {error.strerror}; write an address for the name")
        except ValueError:
            mistakes.append(f"--peers must be HOST:PORT for each machine, got {place!r:.80}; a recipe goes before it")
    loops = [peer.place for peer in found if ip_address(peer.address).is_loopback]
    if len({":" in peer.address for peer in found}) > 1:
        mistakes.append("--peers must be all IPv4 or all IPv6, for a run takes one of them")
    if 0 < len(loops) < len(found):
        mistakes.append(f"{listed(loops)} is loopback here, which others cannot reach; write the address of a network")
    if not mistakes and not 2 <= len({peer[1:] for peer in found}) == len(found) <= MACHINES:
        mistakes.append(f"--peers must name 2 to {MACHINES} machines, each once, got {listed(places)}")
    if mistakes:
        raise OptionsError(mistakes)
    return found


def own_place(peers: Sequence[Peer]) -> tuple[int, str, socket.socket]:
    """Which of the machines this is, the interface that has its address, and a socket that listens there.

    Of several at addresses of this machine it is the first with a free port. OptionsError if there is none.
    """
    known = {addresses[0]: name for name, addresses in interface_addresses().items()}  # a run takes no other
    mistake = (
        f"--peers must name the first address of an interface of this machine, {listed([*known])}; got "
        f"{listed([peer.address for peer in peers])}. Behind a router (NAT), join the machines to a VPN, and write the "
        "addresses that it gives"
    )
    for index, peer in enumerate(peers):
        if peer.address in known:
            try:
                return index, known[peer.address], listening(peer.address, peer.port, MACHINES)
            except OSError as error:
                what = "in use" if error.errno == errno.EADDRINUSE else f"not to be had ({error.strerror})"
                mistake = f"port {peer.port} is {what}; end what listens there, or write another on every machine"
    raise OptionsError(mistake)


class Meeting:
    """This machine among the others: it answers their calls in the background as long as it lives."""

    def __init__(self, peers: Sequence[Peer], index: int, interface: str, listener: socket.socket) -> None:
        self.peers, self.index, self.interface = peers, index, interface
        self._joined: dict[int, tuple[Call, str, float]] = {}
        """Those that called the first machine to meet there, their versions, and how far ahead their clocks are."""
        self._begun = False
        self._listeners = [listener, listening(peers[index].address, backlog=MACHINES)]
        threading.Thread(target=self._serve, name="peers", daemon=True).start()

    def meet(self, wait: float, argv: Sequence[str]) -> Found:
        """What was measured together with the others, which have `wait` seconds to come.

        `argv` are a recipe and its options, or nothing. FailedError if the first machine is not reached.
        """
        if self.index > 0:
            return self._follow(wait)
        deadline, count = time.monotonic() + wait, len(self.peers)
        while len(self._joined) < count - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        self._begun = True
        ways = {}
        for pair in permutations(range(count), 2):
            ways[pair] = self._asked(*pair, wait)
            self._tell(pair=pair, way=ways[pair])
        notes = self._differences() + (predicted(argv, ways) if argv else [])
        self._tell(notes=notes)
        return ways, notes

    def _tell(self, **message: Any) -> None:
        for call, *_ in self._joined.values():
            with suppress(OSError):  # it went away
                call.say(**message)

    def _asked(self, one: int, other: int, wait: float) -> Way:
        """The way from one machine to another, as the one finds it."""
        if one == 0:
            return self._measured(other)
        if one not in self._joined:
            return Way(fault=f"it did not call {self.peers[0].place} within {wait:g} s; what it prints itself says why")
        try:
            self._joined[one][0].say(measure=other)
            return _way(self._joined[one][0].heard(8 * PATIENCE + SECONDS)["way"])
        except _WRONG as error:
            return Way(fault=f"it went away: {why(error, self.peers[one].port)}")

    def _measured(self, index: int) -> Way:
        """The way from here to a machine."""
        peer, port = self.peers[index], self.peers[index].port
        try:
            with self._called(index, port) as (_, chosen):
                port = chosen
            with self._called(index, port) as (call, _):
                return Way(self.interface + path(self.interface, peer.address), *call.measured())
        except _WRONG as error:
            if port == peer.port:
                return Way(fault=why(error, port))
            return Way(
                fault=f"port {peer.port} answers, and port {port} does not: {why(error, port)}. The system chooses "
                "the ports of a run, so let its machines reach all ports of each other"
            )

    def _differences(self) -> list[str]:
        """A sentence for each machine that has other versions than this one, or another time."""
        notes, first = [], self.peers[0].place
        for index, (_, versions, ahead) in sorted(self._joined.items()):
            place = self.peers[index].place
            if versions != _versions():
                notes.append(f"{place} has {versions}, {first} has {_versions()}; install the same on both")
            if abs(ahead) > CLOCKS:
                notes.append(
                    f"the clock of {place} differs by {ahead:+.0f} s from the clock of {first}; set both by NTP"
                )
        return notes

    def _follow(self, wait: float) -> Found:
        first, said = self.peers[0], ""
        # the others try those that did not come
        deadline = time.monotonic() + wait + 2 * len(self.peers) * PATIENCE
        while True:
            try:
                ways = dict[tuple[int, int], Way]()
                with self._called(0, first.port, join=True) as (call, _):
                    while "notes" not in (message := call.heard(wait + PREDICTION)):
                        if "measure" in message:
                            call.say(way=self._measured(int(message["measure"])))
                        else:
                            one, other = message["pair"]
                            ways[one, other] = _way(message["way"])
                return ways, [*map(words, message["notes"])]
            except _WRONG as error:
                reason = f"the first machine, {first.place}: {why(error, first.port)}"
                if getattr(error, "errno", 0) == errno.EPROTO or time.monotonic() > deadline:
                    raise FailedError(reason) from error
            if reason != said:
                print(said := reason, file=sys.stderr)
            time.sleep(0.5)

    @contextmanager
    def _called(self, index: int, port: int, *, join: bool = False) -> Iterator[tuple[Call, int]]:
        """A call that says who calls, and the port that the other's system chose."""
        own, places = (self.peers[self.index].address, 0), [peer.place for peer in self.peers]
        connection = socket.create_connection((self.peers[index].address, port), PATIENCE, own)
        with closing(Call(connection)) as call:
            call.say(peers=places, join=self.index if join else None, versions=_versions(), time=time.time())
            if "refused" in (told := call.heard()):
                raise refusal(told["refused"])
            yield call, int(told["port"])

    def _serve(self) -> None:
        """Answer one call after the other."""
        known = {peer.address for peer in self.peers}
        while True:
            ready, _, _ = select.select(self._listeners, [], [])
            with suppress(*_WRONG):
                connection, address = ready[0].accept()
                with ExitStack() as open_one:
                    open_one.callback((call := Call(connection)).close)
                    if address[0].partition("%")[0] in known and self._answer(call):
                        open_one.pop_all()

    def _answer(self, call: Call) -> bool:
        """Answer a call; whether it stays open."""
        told, places = call.heard(), [peer.place for peer in self.peers]
        joining = told["join"]
        if told["peers"] != places:
            call.say(refused=f"its list is --peers {' '.join(places)}; write the same on every machine")
        elif joining is not None and self._begun:
            call.say(refused="it measures already, without this machine; start the command again on every machine")
        else:
            call.say(port=self._listeners[1].getsockname()[1])
            if joining is None:
                call.answer_measurement()
            elif joining in range(1, len(places)):
                self._joined[joining] = call, words(told["versions"]), float(told["time"]) - time.time()
                return True
        return False


def predicted(argv: Sequence[str], ways: Mapping[tuple[int, int], Way]) -> list[str]:
    """What a recipe costs over the slowest link between neighbours in the list, as `thinwire predict` says it."""
    links = [way for (one, other), way in ways.items() if abs(one - other) == 1]
    rate, latency = min(way.rate or 0 for way in links), max(way.latency or 0 for way in links)
    if not rate:
        return ["nothing is predicted, for a machine does not reach its neighbour in the list"]
    line = ["thinwire", "predict", *argv, "--bandwidth", f"{rate / 1e3:.0f}kbit", "--latency", f"{latency * 1e6:.0f}us"]
    try:
        command = [sys.executable, "-m", *line, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PREDICTION)
    except subprocess.TimeoutExpired:
        return [f"no prediction within {PREDICTION:g} s: {' '.join(line)}"]
    if done.returncode:
        return [done.stderr.strip().rpartition("\n")[2]]
    told = json.loads(done.stdout)
    own, steps = told["predictions"][:2][-1], told["workload"]["steps"]
    return [
        f"{' '.join(line)}: {own['samples_per_second']:.3g} samples/s with {own['codec']}, {own['speedup']:.2f} times "
        f"as fast as none, and {duration_text(steps * own['seconds'])} for {steps:,} steps, if every link is like the "
        "slowest between neighbours in the list"
    ]


def path(interface: str, address: str) -> str:
    """How Tailscale carries what goes to an address: direct or relayed; empty where it does not."""
    if not interface.startswith("tailscale"):
        return ""
    try:
        done = subprocess.run(["tailscale", "status", "--json"], capture_output=True, timeout=COMMAND_SECONDS)
        [peer] = [each for each in json.loads(done.stdout)["Peer"].values() if address in each["TailscaleIPs"]]
        return ", direct" if peer["CurAddr"] else f", relayed by {peer['Relay']}"
    except (*_WRONG, subprocess.SubprocessError, AttributeError):
        return f", direct or relayed: see tailscale ping {address}"


def _way(told: Any) -> Way:
    """A way as another machine tells it. ValueError or TypeError if it is none."""
    over, latency, rate, fault = told
    latency, rate = (None if value is None else float(value) for value in (latency, rate))
    return Way(words(over), latency, rate, words(fault))


def _versions() -> str:
    return f"thinwire {version('thinwire')} and torch {version('torch')}"
