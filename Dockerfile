# docker build -t kaon .                                   CPU
# docker build -t kaon --build-arg BASE=rocm/pytorch .     a base with a torch of its own keeps it
ARG BASE=python:3.12-slim
FROM ${BASE}

# A compiler for the operators in C, without which the experts of a mixture take longer.
RUN (command -v make && command -v cc) >/dev/null || (apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev make && rm -rf /var/lib/apt/lists/*)

WORKDIR /opt/kaon
COPY . .
RUN PIP_NO_CACHE_DIR=1 make install

# Where hub checkpoints are kept: mount a volume here to download them once.
ENV HF_HOME=/var/cache/kaon
RUN useradd --system --uid 10001 kaon && install -d -o kaon /var/cache/kaon
USER kaon

EXPOSE 8000
ENTRYPOINT ["/opt/kaon/.venv/bin/kaon"]
CMD ["serve", "--host", "0.0.0.0"]
