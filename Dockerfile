# posttrain in a container: docs/platforms.md#a-container
FROM python:3.12-slim-bookworm

# g++ compiles the CPU kernels at first use; bubblewrap holds the programs that verifiers run, under this python3.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap g++ python3 \
    && rm -rf /var/lib/apt/lists/*

# An index with builds of PyTorch for CPUs alone, or for one version of CUDA; empty: pip's own choice.
ARG TORCH_INDEX=
# Extras of pyproject.toml, as verifiers,mcp.
ARG EXTRAS=verifiers

WORKDIR /opt/posttrain
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY recipes recipes
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt ".[$EXTRAS]"

WORKDIR /work
ENV POSTTRAIN_CACHE=/work/.cache/posttrain
ENTRYPOINT ["posttrain"]
CMD ["doctor"]
