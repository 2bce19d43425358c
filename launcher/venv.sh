# shellcheck shell=bash
# Sourced by run-local, run-ssh, run-ray and run-tests, and on the hosts by the porter (--sync).
# Defines `venv_python EXTRA`: sets $python to the interpreter of .venv in the repository, which is
# made and filled on first use, and again whenever pyproject.toml changes or the interpreter is
# gone. Afterwards it costs one checksum.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

venv_fail() {
    printf 'rackrun: %s\n' "$1" >&2
    exit 78
}

venv_check_base() {
    local base=$1
    command -v "$base" >/dev/null ||
        venv_fail "no $base on this machine; type: sudo apt-get install python3 python3-venv"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        venv_fail "$base is older than 3.11; install a newer one and type: PYTHON=python3.11 $0"
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        venv_fail "$base cannot make environments; type: sudo apt-get install python3-venv"
}

venv_install() {
    local extra=$1 base=${PYTHON:-python3}
    venv_check_base "$base"
    local quiet=(--quiet) # in a log only what goes wrong; on a terminal pip's bars
    if compgen -G "$root/.venv/lib/python3*/site-packages/torch" >/dev/null; then
        printf 'rackrun: bringing %s up to date with pyproject.toml\n' "$root/.venv" >&2
    else
        printf 'rackrun: first use: installing PyTorch and the project into %s (a few minutes)\n' \
            "$root/.venv" >&2
        [ ! -t 2 ] || quiet=()
    fi
    [ -x "$root/.venv/bin/python" ] || "$base" -m venv --clear "$root/.venv" ||
        venv_fail "could not make $root/.venv; see the lines above"
    "$root/.venv/bin/python" -m pip install --disable-pip-version-check "${quiet[@]}" \
        --progress-bar on --editable "$root${extra:+[$extra]}" >&2 ||
        venv_fail "the installation failed; see the lines above, then type the same command again"
}

venv_is_current() {
    local stamp=$1 wanted=$2
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && [ -x "$python" ]
}

venv_python() {
    local extra=$1 stamp="$root/.venv/installed${1:+-$1}" wanted
    python="$root/.venv/bin/python"
    wanted="$root $(cksum <"$root/pyproject.toml")"
    venv_is_current "$stamp" "$wanted" && return
    mkdir -p "$root/.venv"
    (
        flock 9 # a second first use waits for the first one
        venv_is_current "$stamp" "$wanted" || {
            venv_install "$extra"
            printf '%s' "$wanted" >"$stamp"
        }
    ) 9>"$root/.venv.lock" || exit
}
