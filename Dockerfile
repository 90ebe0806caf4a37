# docker build -t kaon .                  AMD GPUs, on an image that brings ROCm and its torch
# docker build -t kaon --target cuda .    NVIDIA GPUs, with the torch that pip brings
# docker build -t kaon --target cpu .     CPUs; with --build-arg TORCH_INDEX=... naming an index of CPU builds, a small image
#
# docs/gpu.md has the line that runs it with its devices and groups. Without an API key (-e KAON_API_KEY, or
# --api-key-file on a mounted file) the server refuses to listen beyond the container.
# Bases are named by digest, because a tag can be moved; `make pins` updates them (docs/dependencies.md).
ARG ROCM_BASE=rocm/pytorch:rocm7.2.4_ubuntu24.04_py3.12_pytorch_release_2.10.0@sha256:4449f856653602317e4101a76fce599c7fcd58ccec2e539951fce5f73083179e
ARG PYTHON_BASE=python:3.12.14-slim-trixie@sha256:f77ac9e44ae96ef2c90b8053ea08c31f8be030f824196b0ae4db6d462c84e51f

# Where `--build-context model=DIR` names a checkpoint, it takes the place of this stage.
FROM scratch AS model

FROM ${PYTHON_BASE} AS build
ARG TORCH_INDEX=
# For CUDA: --build-arg TORCH_LOCK=deploy/locks/torch-cuda.txt checks the hashes of torch, too (docs/dependencies.md).
ARG TORCH_LOCK=
# Equal sources on an equal base give equal layers: docs/dependencies.md.
ARG SOURCE_DATE_EPOCH
COPY . /opt/kaon
WORKDIR /opt/kaon
RUN PIP_EXTRA_INDEX_URL=${TORCH_INDEX} KAON_TORCH_LOCK=${TORCH_LOCK} sh deploy/container.sh

# Without the compiler, which nothing needs that runs on a CPU: over torch it is less than 250 MB.
FROM ${PYTHON_BASE} AS cpu
ARG SOURCE_DATE_EPOCH
COPY --from=build /opt/kaon /opt/kaon
WORKDIR /opt/kaon
RUN sh deploy/container.sh user
# Where hub checkpoints, packed weights (XDG_CACHE_HOME) and compiled code are kept: mount a volume here to download, pack
# and compile once.
ENV HF_HOME=/var/cache/kaon TORCHINDUCTOR_CACHE_DIR=/var/cache/kaon/inductor XDG_CACHE_HOME=/var/cache/kaon
USER kaon
EXPOSE 8000
HEALTHCHECK --start-period=30m CMD [".venv/bin/python", "-m", "server.healthcheck"]
ENTRYPOINT ["/opt/kaon/.venv/bin/kaon"]
CMD ["serve", "--host", "0.0.0.0"]

# By itself pip brings the torch that is built for CUDA; Triton compiles its launchers when they are first used. The last
# variables are what NVIDIA's container runtime goes by.
FROM build AS cuda
ENV HF_HOME=/var/cache/kaon TORCHINDUCTOR_CACHE_DIR=/var/cache/kaon/inductor \
    TRITON_CACHE_DIR=/var/cache/kaon/triton XDG_CACHE_HOME=/var/cache/kaon
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER kaon
# --build-arg KERNELS=sm_90 --build-context model=DIR: the image has the kernels of a model compiled (docs/gpu.md).
ARG KERNELS=
RUN --mount=type=bind,from=model,target=/model \
    if [ -n "$KERNELS" ]; then .venv/bin/kaon kernels build --target "$KERNELS" --model /model; fi
EXPOSE 8000
HEALTHCHECK --start-period=30m CMD [".venv/bin/python", "-m", "server.healthcheck"]
ENTRYPOINT ["/opt/kaon/.venv/bin/kaon"]
CMD ["serve", "--host", "0.0.0.0"]

# The last one is what `docker build` makes when it is not told otherwise.
FROM ${ROCM_BASE} AS rocm
ARG SOURCE_DATE_EPOCH
COPY . /opt/kaon
WORKDIR /opt/kaon
RUN sh deploy/container.sh rocm
# XDG_CACHE_HOME: aiter's, too, in a folder for each release of it (models/ops/aiter/probe.py).
ENV HF_HOME=/var/cache/kaon TORCHINDUCTOR_CACHE_DIR=/var/cache/kaon/inductor \
    TRITON_CACHE_DIR=/var/cache/kaon/triton XDG_CACHE_HOME=/var/cache/kaon
USER kaon
# --build-arg KERNELS=gfx942 --build-context model=DIR: the image has the kernels of a model compiled (docs/gpu.md).
ARG KERNELS=
RUN --mount=type=bind,from=model,target=/model \
    if [ -n "$KERNELS" ]; then .venv/bin/kaon kernels build --target "$KERNELS" --model /model; fi
EXPOSE 8000
HEALTHCHECK --start-period=30m CMD [".venv/bin/python", "-m", "server.healthcheck"]
ENTRYPOINT ["/opt/kaon/.venv/bin/kaon"]
CMD ["serve", "--host", "0.0.0.0"]
