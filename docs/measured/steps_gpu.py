"""Seconds of a step of four stages that share one GPU, over gloo on loopback: each codec, none, and plain torch.

    make bench-gpu
    python docs/measured/steps_gpu.py --folder traces        # and a trace of a step, for https://ui.perfetto.dev
    python docs/measured/steps_gpu.py --tiny                 # a tiny model, on a CPU too: whether it works

A GPT of 350 M parameters in bf16, 8 micro-batches of 1 x 1024 tokens, 1f1b. All contenders take turns in the same
four processes, each with a copy of the model: on a GPU that is too small, --only names some of them. Plain torch is
PipelineStage with bf16 at the boundaries, copied to the host and back where a stage begins and ends, because gloo
carries tensors of the host alone; it trains two copies of the weights that embedding and head share.

Exposed codec time is what encode and decode take on the stream of compute, by CUDA events, in the process where they
take most. It counts all that the stream waits for there: the copy of a frame to the GPU, and the other processes'
turns on the GPU that they share. So it is an upper bound.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import Contender, PlainTorch, Thinwire

from thinwire.launch.plan.places import real_placement
from thinwire.launch.plan.prepare import prepare
from thinwire.launch.plan.prepared import Prepared
from thinwire.launch.processes.rendezvous import join
from thinwire.launch.recipe import recipe
from thinwire.pipeline.devices.device import CPU, choose, described, seconds_now, use
from thinwire.pipeline.devices.memory import peak_on_gpu
from thinwire.pipeline.options import CompressionOptions
from thinwire.pipeline.processes.collectives import connected
from thinwire.pipeline.processes.placement import Placement

PLAIN = "PipelineStage"
CODECS: Mapping[str, CompressionOptions | None] = {
    PLAIN: None,
    "none": CompressionOptions(activations="none", gradients="none"),
    "the default": CompressionOptions(),
    "q(4)/q(8)": CompressionOptions(activations="q(4)", gradients="q(8)"),
    "q(2)/q(4)": CompressionOptions(activations="q(2)", gradients="q(4)"),
    "aqsgd(q(4))/q(8)": CompressionOptions(activations='aqsgd(q(4), store="device")', gradients="q(8)"),
}
STAGES, MICROBATCHES, BATCHES = 4, 8, 2
GPT = {"n_layer": 24, "n_embd": 1024, "n_head": 16, "n_positions": 1024, "vocab_size": 50257}
TINY = {"n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 256}
SECTIONS = ("compute", "encode", "decode", "neighbour", "wire", "wait")


def words(tiny: bool, device: str) -> list[str]:
    """The recipe, as arguments of a command."""
    config = TINY if tiny else GPT
    block = config["n_positions"]
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    fields = {
        "model.config": json.dumps(config | dropout),
        "data.block_size": block,
        "data.held_out": 0,
        "data.limit": block * (MICROBATCHES * BATCHES + 1),
        "pipeline.num_stages": STAGES,
        "pipeline.schedule": "1f1b",
        "pipeline.num_microbatches": MICROBATCHES,
        "pipeline.microbatch_size": 1,
        "training.precision": "bf16",
        "training.device": device,
    }
    return ["quickstart", *(word for name, value in fields.items() for word in (f"--{name}", str(value)))]


def main() -> int:
    """Measure and print the page, or be one of the processes; 0 also where there is no GPU, with the reason."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="of each contender (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(CODECS), default=list(CODECS), help="these contenders")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on the CPU where there is no GPU")
    parser.add_argument("--folder", type=Path, help="for traces")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = choose("auto")
    if device == CPU and not options.tiny:
        print("not measured: this needs a CUDA device, and torch finds none here; --tiny tries the script on the CPU")
        return 0
    if options.work:
        work(options, device)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--work", folder]
        around = {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(STAGES),
            "MASTER_ADDR": "127.0.0.1",
        }
        with free_port() as port:
            around["MASTER_PORT"] = str(port)
        processes = [
            subprocess.Popen(command, env=os.environ | around | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(STAGES)
        ]
        ends = [process.wait() for process in processes]
        if any(ends):
            return 1
        print(page([json.loads(Path(folder, str(rank)).read_text()) for rank in range(STAGES)], options.steps))
    return 0


@contextmanager
def free_port() -> Iterator[int]:
    """A port of loopback that nobody uses."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        yield listening.getsockname()[1]


@dataclass
class CodecTime:
    """The seconds of encode and decode on the stream of compute of one process."""

    device: torch.device
    _pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def watch(self, meter: Any) -> None:
        """Count the codecs of a stage from now on; each is a range of a trace."""
        section = meter.section

        def watched(name: str, *arguments: Any, **more: Any) -> Any:
            begun = section(name, *arguments, **more)
            return self._timed(name, begun) if name in ("encode", "decode") else begun

        meter.section = watched

    @contextmanager
    def _timed(self, name: str, section: Any) -> Iterator[None]:
        with section, torch.profiler.record_function(name):
            begun = self._moment()
            yield
            self._pairs.append((begun, self._moment()))

    def take(self) -> float:
        """The seconds since the last call; the device has done everything."""
        spent = sum(
            ended - begun if self.device == CPU else begun.elapsed_time(ended) / 1e3 for begun, ended in self._pairs
        )
        self._pairs.clear()
        return spent

    def _moment(self) -> Any:
        if self.device == CPU:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def work(options: argparse.Namespace, device: torch.device) -> None:
    """One of the processes: all contenders take turns, and what it measured is written down."""
    rank = int(os.environ["RANK"])
    wanted = recipe.parse(words(options.tiny, "auto"))
    prepared = prepare(wanted, stages=real_placement(wanted, rank).stages_of(rank))
    join(prepared, rank)
    use(device := choose("auto", rank))
    where = connected(real_placement(prepared.recipe, rank), timedelta(seconds=prepared.recipe.wire.timeout))
    contenders, codec_time = {}, CodecTime(device)
    for index, name in enumerate(options.only):
        folder = Path(options.work, f"{rank}-{index}")
        contenders[name] = contender = made(CODECS[name], prepared, where, rank, device, folder)
        for stage in contender.stages if isinstance(contender, Thinwire) else ():
            codec_time.watch(stage.meter)
    size = prepared.recipe.batch_size
    batches = [torch.arange(size) + size * index for index in range(BATCHES)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for step in range(options.steps + 2 * BATCHES):  # the first steps compile, and fill the buffers of AQ-SGD
        for name, contender in contenders.items():
            seconds, sections = timed(partial(contender.step, batches[step % BATCHES]), device)
            codecs = codec_time.take()
            if step >= 2 * BATCHES:
                found[name].append({"seconds": seconds, "codecs": codecs, "sections": sections})
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
        for name, contender in contenders.items():
            trace(contender, batches[0], options.folder / f"{file_name(name)}-stage-{rank}.json", device)
    peak = peak_on_gpu(device)
    told = {"device": described(device), "peak": peak, "steps": found, "tiny": options.tiny}
    Path(options.work, str(rank)).write_text(json.dumps(told))
    for contender in contenders.values():
        contender.close()
    dist.barrier()
    dist.destroy_process_group()


def made(
    codecs: CompressionOptions | None,
    prepared: Prepared,
    where: Placement,
    rank: int,
    device: torch.device,
    folder: Path,
) -> Contender:
    """A contender; collective."""
    if codecs is None:
        return PlainTorch(prepared, where, rank, torch.bfloat16, device)
    return Thinwire(prepared, where, rank, codecs, folder)


def timed(act: Callable[[], Any], device: torch.device) -> tuple[float, dict[str, float]]:
    """Seconds from the start of all processes until the devices of all are done; and those of the launching thread."""
    seconds_now(device)
    dist.barrier()
    started = time.perf_counter()
    measured = act()
    seconds_now(device)
    dist.barrier()
    return time.perf_counter() - started, measured.sections


def trace(contender: Contender, ids: torch.Tensor, path: Path, device: torch.device) -> None:
    """Write a trace of one step: kernels and copies by stream, and the sections of the launching thread."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if device != CPU else []
    with torch.profiler.profile(activities=kinds) as profile:
        timed(partial(contender.step, ids), device)
    profile.export_chrome_trace(str(path))


def file_name(contender: str) -> str:
    """The name of a contender, for a file."""
    return "".join(letter if letter.isalnum() else "-" for letter in contender).strip("-")


def page(told: Sequence[Mapping[str, Any]], steps: int) -> str:
    """What the processes measured, as Markdown."""
    tiny = ", a tiny model in place of 350 M parameters: the numbers mean nothing" * told[0]["tiny"]
    names = list(told[0]["steps"])
    base = statistics.median(step["seconds"] for step in told[0]["steps"].get(PLAIN, told[0]["steps"][names[0]]))
    lines = [
        f"{STAGES} stages on {', '.join(sorted({one['device'] for one in told}))}; torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}, {platform.platform()}",
        f"medians of {steps} steps, in turns{tiny}",
        "",
        f"| codecs | step, ms | of {PLAIN if PLAIN in names else names[0]} | exposed codec time, of the step | "
        + " | ".join(f"{name}, ms" for name in SECTIONS)
        + " |",
        "|---" * (4 + len(SECTIONS)) + "|",
    ]
    for name in names:
        by_process = [one["steps"][name] for one in told]
        seconds = statistics.median(step["seconds"] for step in by_process[0])
        shares = [statistics.median(step["codecs"] / step["seconds"] for step in own) for own in by_process]
        cells = [f"`{name}`", f"{seconds * 1e3:.1f}", f"{seconds / base:.2f}"]
        if by_process[0][0]["sections"]:
            means = [
                statistics.mean(statistics.median(step["sections"][section] for step in own) for own in by_process)
                for section in SECTIONS
            ]
            cells += [f"{max(shares):.1%}", *(f"{mean * 1e3:.1f}" for mean in means)]
        else:
            cells += [""] * (1 + len(SECTIONS))
        lines.append(f"| {' | '.join(cells)} |")
    peaks = [one["peak"] for one in told]
    if None not in peaks:
        lines += ["", f"peak on the GPU, of all contenders: {', '.join(f'{peak / 1e9:.1f} GB' for peak in peaks)}"]
    lines += ["", "The times of sections are those of the launching thread, means over the stages."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
