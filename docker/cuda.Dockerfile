# One stage of a pipeline in a container, on a GPU. From the root of the repository:
#     docker build -f docker/cuda.Dockerfile -t thinwire-cuda .
#     docker run --gpus all ..., with the NVIDIA Container Toolkit on the host
# Not built yet: nobody has tried it. It differs from Dockerfile only in what a GPU needs.
FROM python:3.11-slim

# gcc and g++ are for training.compile: Triton compiles its launchers, and torch its loops for the CPU.
RUN apt-get update && apt-get install --yes --no-install-recommends iproute2 gcc g++ && rm -rf /var/lib/apt/lists/*

# The toolkit puts the driver into the container; CUDA itself comes with torch.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The log levels are torch's and torchrun's: the first stage keeps torchrun's store, and where it leaves before another,
# that one prints a traceback after a run in which nothing went wrong (pytorch issue 69520).
ENV PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 TORCH_CPP_LOG_LEVEL=ERROR LOGLEVEL=CRITICAL

# Healthy once the stage has met the others: it holds an open TCP connection that is not to itself.
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=3 \
    CMD ["awk", "$4 == \"01\" && $3 !~ /0100007F:/ { met = 1 } END { exit !met }", "/proc/net/tcp", "/proc/net/tcp6"]

# Starts as root to shape the network, then becomes the user thinwire for good.
ENTRYPOINT ["python", "/opt/thinwire/docker/entrypoint.py"]
CMD ["thinwire", "--help"]

# Where packages come from; PyPI has torch with CUDA. An index such as https://download.pytorch.org/whl/cu128 has builds
# for one version of CUDA.
ARG PIP_INDEX_URL=https://pypi.org/simple
ARG PIP_EXTRA_INDEX_URL=
ARG PIP_FIND_LINKS=
# A version, as in torch==2.13.0
ARG TORCH=torch

# .dockerignore lists what is copied. Runs go to runs/NAME of the current folder, so to the volume /runs.
# A build of torch without CUDA, or a torchvision made for another torch, fails here rather than in every stage.
COPY . /opt/thinwire
RUN pip install --no-cache-dir "$TORCH" /opt/thinwire \
    && python -c "import torch, torchvision; assert torch.version.cuda, 'this torch has no CUDA'" \
    && useradd --uid 1000 --create-home thinwire \
    && mkdir --parents /data /runs \
    && chown thinwire: /data /runs
