# Builds the wheel with all CUDA kernels, and a machine that runs the tests:
#   docker build --target wheel --output dist .             the wheel, into dist/
#   docker build -t dmattn .                                then
#   docker run --rm dmattn                                  the tests that need no GPU
#   docker run --rm --gpus all -e DMATTN_FAMILY=sm80 dmattn .venv/bin/python -m pytest -m gpu -n 8
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends ccache g++ git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_CACHE_DIR=/cache/pip CCACHE_DIR=/cache/ccache
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/cache make wheel CUDA=ON

FROM scratch AS wheel
COPY --from=build /src/dist/ /

FROM build AS test
RUN --mount=type=cache,target=/cache make build CUDA=ON && .venv/bin/pip install -q --group test
CMD [".venv/bin/python", "-m", "pytest", "-m", "not gpu"]
