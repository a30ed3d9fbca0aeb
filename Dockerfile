# An image for CPUs:   docker build -t phalanx .
# For GPUs of NVIDIA:  docker build -t phalanx:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
FROM python:3.11-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# git fetches the code of jobs. For strategy.graph (torch.compile on CPUs) add g++.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 phalanx \
    && install --directory --owner=phalanx --group=phalanx /work /home/phalanx/.local/share/phalanx
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch>=2.13,<2.14" \
    && pip install --no-cache-dir --find-links /wheels "phalanx[all]"
USER phalanx
WORKDIR /work
ENV PYTHONUNBUFFERED=1
CMD ["phalanx", "doctor"]
