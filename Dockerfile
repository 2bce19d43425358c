# The image of a training host: for Slurm (pyxis, enroot), NGC, Kubernetes, ./run-ssh --image.
#
#   docker build --tag rackrun:1 .
#
# Where no registry can be reached, make a base of Debian's packages first:
#
#   mmdebstrap --variant=minbase --include=python3-dev,python3-venv bookworm | docker import - base
#   docker build --build-arg BASE=base --tag rackrun:1 .

ARG BASE=python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1
FROM ${BASE}

# nginx, so that the same image serves the shards; the ssh client, to launch from the image; g++, for
# --compile. --build-arg PACKAGES= leaves all out.
ARG PACKAGES="nginx-light openssh-client g++"
RUN if [ -n "${PACKAGES}" ]; then \
        apt-get update -qq && \
        apt-get install -qq -y --no-install-recommends ${PACKAGES} && \
        rm -rf /var/lib/apt/lists/*; \
    fi

# A user of its own: nothing here is written as root, whatever account starts the container.
RUN groupadd --gid 1000 rackrun && useradd --uid 1000 --gid 1000 --create-home rackrun

# Everything that the project needs: the files whose hashes are in the lock; PyTorch with CUDA.
ARG LOCK=requirements/base.txt
WORKDIR /opt/rackrun
COPY requirements/base.txt requirements/cuda12.txt requirements/
RUN python3 -m venv /opt/venv && \
    /opt/venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --quiet \
        --require-hashes --only-binary :all: --requirement ${LOCK}

# The project itself, as .dockerignore selects it; its user can read it and not change it.
COPY . .
# HOME: caches go where any account may write, on a read-only root as well.
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp \
    PYTHONPATH=/opt/rackrun \
    PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
WORKDIR /home/rackrun
# No ENTRYPOINT: pyxis, NGC and Kubernetes bring their own command.
CMD ["python", "-m", "rackrun", "node", "--help"]
