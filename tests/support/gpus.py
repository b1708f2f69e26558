"""Stand-ins for a GPU: fake tensors, which have a device and no values; and streams that write orders down."""

import threading
from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda", 0)


class FakeGpu(TorchFunctionMode):
    """Tensors on a GPU that is not there; those of the host are as ever.

    Mixed devices fail, and so does every look of the host at a value of the GPU, for which it would have to wait.
    """

    def __init__(self):
        super().__init__()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = (*args, *(kwargs or {}).values())
        on_gpu = any(
            isinstance(value, FakeTensor) or (isinstance(value, torch.device) and value.type == "cuda")
            for value in given
        )
        with self._mode if on_gpu else nullcontext():
            return func(*args, **(kwargs or {}))


def fake_put(tensor, device):
    """In place of `put`: fake tensors cannot be pinned."""
    return tensor.to(device)


class Launches:
    """In place of a kernel of Triton: it writes nothing, and `seen` gets what it is launched with."""

    def __init__(self, seen=lambda *_: None):
        self.seen = seen

    def __getitem__(self, grid):
        return lambda *given, **options: self.seen(given)


def launches_of(module):
    """The names of a module's kernels that a host launches."""
    return [
        name for name, each in vars(module).items() if type(each).__name__ in ("JITFunction", "InterpretedFunction")
    ]


class Moment:
    """An event; it has come only after `come`, or at once if its streams are in time."""

    def __init__(self, log, name, *, come):
        self.log, self.name = log, name
        self._come = threading.Event()
        if come:
            self._come.set()

    def come(self):
        self._come.set()

    def query(self):
        return self._come.is_set()

    def synchronize(self):
        self.log.append(("waited for", self.name, threading.current_thread().name))
        assert self._come.wait(20), f"{self.name} never came"


class Stream:
    """A stream that writes its orders down."""

    def __init__(self, log, name, *, in_time):
        self.log, self.name, self.in_time = log, name, in_time
        self.moments = []

    def record_event(self):
        moment = Moment(self.log, f"{self.name} {len(self.moments)}", come=self.in_time)
        self.moments.append(moment)
        self.log.append(("recorded", moment.name))
        return moment

    def wait_event(self, moment):
        self.log.append((f"{self.name} holds for", moment.name))

    def __enter__(self):
        self.log.append(("on", self.name))

    def __exit__(self, *exception):
        pass


class Streams:
    """Takes the place of torch's streams; `log` has all orders in their order."""

    def __init__(self, monkeypatch, *, in_time=True):
        self.log = []
        self.compute = Stream(self.log, "compute", in_time=in_time)
        self.side = Stream(self.log, "side", in_time=in_time)
        monkeypatch.setattr(torch, "Stream", lambda device: self.side)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: self.compute)
