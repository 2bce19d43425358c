# shellcheck shell=bash
# Sourced by run-tests: the Debian packages that the tests drive for real. As root, and in CI, what is
# missing is installed. Other users leave out the tests that need it.
machine_needs() { # COMMAND PACKAGE...
    local command=$1
    shift
    PATH=$PATH:/usr/sbin:/sbin command -v "$command" >/dev/null || missing+=("$@")
}

missing=()
machine_needs strace strace
machine_needs zsh zsh
machine_needs fish fish
machine_needs shellcheck shellcheck
machine_needs sshd openssh-server openssh-client
machine_needs ip iproute2
machine_needs tc iproute2
machine_needs iptables iptables
machine_needs nginx nginx-light
machine_needs slurmctld slurmctld slurm-client
machine_needs slurmd slurmd
machine_needs munged munge
machine_needs mmdebstrap mmdebstrap
machine_needs chromium chromium
machine_needs dockerd docker.io iptables
if [ ${#missing[@]} -gt 0 ]; then
    sudo=$([ "$(id -u)" = 0 ] || echo sudo)
    printf 'run-tests: installing %s\n' "${missing[*]}" >&2
    if ! { $sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $sudo apt-get install \
        -qq -y --no-install-recommends "${missing[@]}"; } >/dev/null; then
        printf 'run-tests: could not; type: sudo apt-get install %s\n' "${missing[*]}" >&2
        exit 78
    fi
fi
