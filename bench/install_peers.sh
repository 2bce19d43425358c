#!/bin/sh
# Install the peers that bench/peers.py compares with into an environment:
#
#     bench/install_peers.sh /tmp/peers      then: python -m bench.peers --peers /tmp/peers/bin/python
#
# FFCV is compiled: it needs a compiler and the headers of libturbojpeg and OpenCV. SPDL decodes with
# the FFmpeg of the system. apt installs both (as root). PyTorch has the version of the environment in .venv.
set -eu
folder=${1:?usage: bench/install_peers.sh FOLDER}
root=$(cd "$(dirname "$0")/.." && pwd)

apt-get install -y --no-install-recommends \
    g++ pkg-config python3-dev libturbojpeg0-dev libopencv-dev ffmpeg

"$root/.venv/bin/python" -m venv "$folder"
version() { "$root/.venv/bin/python" -c "import importlib.metadata as m; print(m.version('$1'))"; }
"$folder/bin/python" -m pip install "torch==$(version torch)" "torchvision==$(version torchvision)" \
    "webdataset==$(version webdataset)" mosaicml-streaming litdata spdl spdl-io nvidia-dali-cuda120 \
    psutil
"$folder/bin/python" -m pip install ffcv  # after numpy, which its build reads
