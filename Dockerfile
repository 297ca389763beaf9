# docker build -t megalite .                                                          torch's CUDA build, C++ kernels
# docker build -t megalite --build-arg BASE=nvidia/cuda:VERSION-devel-ubuntu24.04 .   with nvcc: CUDA kernels too
# See docs/containers.md.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}
# A compiler and Python's headers for the native kernels; Triton also needs a compiler at run time.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
# Of its own: distributions do not let pip install beside their packages.
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /workspace
# In a layer of its own, which a change of the code does not build again.
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e ".[log,data]"
CMD ["megalite", "--help"]
