# kvlab on CUDA: docker build -f tools/docker/cuda.Dockerfile -t kvlab-cuda . &&
#   docker run --rm --gpus all -v "$PWD:/work" kvlab-cuda demo
# ARCHITECTURES: those of the GPU, as CMake names them. Fewer architectures build faster.
FROM debian:12-slim AS vega
RUN apt-get update && apt-get install -y --no-install-recommends libjs-vega

# The version that the measurements used. It needs driver 580 or newer.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG ARCHITECTURES=80-real;90
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    cmake ninja-build g++ pkg-config libboost-program-options-dev nlohmann-json3-dev libfmt-dev \
    libxxhash-dev libpcre2-dev libutf8proc-dev && rm -rf /var/lib/apt/lists/*
# Ubuntu may lack libjs-vega, which draws pages.
COPY --from=vega /usr/share/javascript/vega /usr/share/javascript/vega
COPY . /source
WORKDIR /source
RUN cmake --preset cuda -DKVLAB_TESTS=OFF -DCMAKE_CUDA_ARCHITECTURES="$ARCHITECTURES" && \
    cmake --build --preset cuda && cmake --install build --prefix /usr/local --component command
WORKDIR /work
ENTRYPOINT ["kvlab"]
