# shellcheck shell=bash
# Sourced by run-local, run-ssh, run-ray and run-tests, and on hosts by launcher/remote/upload.py
# (--sync).
# Defines `venv_python EXTRAS...`: sets $python to the interpreter of .venv in the repository, which is
# made and filled on first use, and again whenever pyproject.toml or the lock in requirements/
# changes or the interpreter is gone. Afterwards it costs one checksum.
#
# Only files whose hashes are in the lock are installed, so every host gets the same ones whenever it
# asks, and no package's own build script runs. uv installs, with pip's settings (an index, a
# certificate, a proxy); where this machine has no uv, pip brings the one of the lock first. Where
# --sync-wheels brought wheels, no index is asked.
#
# Where $PYTHON, or python3, has a torch already (an image of NGC, an active conda or virtual
# environment, a loaded module), .venv uses that one, and the lock supplies the rest.
#
# Where the driver or the GPUs are too old for the torch of requirements/base.txt, another lock takes
# its place: rackrun/cuda.py knows which, unless $RACKRUN_LOCK names one. .venv/lock remembers it.

trap 'trap - INT; kill -INT $$' INT # else lost where the program that ran meanwhile ended well

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -d "$root/rackrun" ] || root=${root%/*} # an installed rackrun, brought by --sync: it has launcher/ in it

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
}

venv_no_pip() { # BASE
    venv_fail "$1 cannot make environments; type: sudo apt-get install python3-venv"
}

venv_link() { # prints the path of the link to another environment's torch, if there is one
    compgen -G "$root/.venv/lib/python3*/site-packages/found-torch.pth"
}

venv_has_own_torch() {
    compgen -G "$root/.venv/lib/python3*/site-packages/torch" >/dev/null
}

venv_torch_is_there() { # the one that was found may be gone, or wanted no more
    local link folder
    link=$(venv_link) || return 0
    [ -z "${RACKRUN_OWN_TORCH:-}" ] && read -r folder <"$link" && [ -d "$folder/torch" ]
}

venv_finds_torch() { # BASE: makes .venv with BASE's torch, and sets $locks to what is missing
    local folder="$root/.venv" finder=$1 link
    link=$(venv_link) || link=
    [ -z "$link" ] || [ ! -x "$python" ] || finder=$python
    if [ -n "${RACKRUN_OWN_TORCH:-}" ] || venv_has_own_torch ||
        ! "$finder" -P "$root/rackrun/launcher/files/found_torch.py" "$folder" "${locks[@]}" >&2; then
        [ -z "$link" ] || rm -f "$link"
        return 1
    fi
    locks=("${locks[@]/#*requirements/$folder/locks}")
}

# For a command of the user's own: gives .venv BASE's torch, whatever its version, and installs
# nothing beside it. Fails where there is none, or the one of the lock is wanted. An older Python with
# a torch runs the command without .venv.
venv_links_torch() { # BASE
    venv_has_own_torch && return
    [ -z "${RACKRUN_OWN_TORCH:-}" ] && venv_sees_torch "$1" || return 1
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || return 0
    "$1" -P "$root/rackrun/launcher/files/found_torch.py" "$root/.venv" >&2 && venv_adds_project
}

venv_sees_torch() { # BASE
    "$1" -c 'import importlib.util, sys
sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null
}

venv_adds_project() { # .venv imports rackrun from where it is
    "$root/.venv/bin/python" -c 'import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "rackrun.pth").write_text(sys.argv[1] + "\n")' "$root"
}

# Sets $uv to the uv that installs: the one of this machine or of BASE's environment, else the one of
# the lock, which pip brings.
venv_find_uv() { # BASE
    uv=$(command -v uv "$(dirname "$(command -v "$1")")/uv" | head -n 1)
    uv=${uv:-$root/.venv/bin/uv}
    [ ! -x "$uv" ] || return 0
    # Not satisfied by a uv that .venv sees beside another environment's torch: it has no program.
    PIP_CONSTRAINT='' "$python" -m pip install --disable-pip-version-check --retries 1 --quiet \
        --ignore-installed --require-hashes --only-binary :all: "${wheels[@]}" \
        --requirement <(sed -n '/^uv==/,/# via/p' "${locks[@]}") >&2 || venv_not_installed
}

venv_not_installed() {
    local next='type the same command again'
    if [ ${#wheels[@]} != 0 ]; then # of another lock, it may be
        next="bring the wheels of requirements/$lock.txt: python3 -m pip download --require-hashes"
        next+=" --only-binary :all: -r requirements/$lock.txt -d FOLDER, and --sync-wheels FOLDER"
    fi
    venv_fail "the installation failed; see the lines above, then $next"
}

venv_get() { # WORDS...
    "$python" -P "$root/rackrun/launcher/files/pip_settings.py" "$uv" pip install \
        --python "$python" "${quiet[@]}" "$@" >&2 || venv_not_installed
}

venv_wheels() { # sets $wheels to the options for wheels that were brought, if there are any
    local folder
    wheels=()
    for folder in "$root/.rackrun/wheels" "$root/wheels"; do
        [ ! -d "$folder" ] || wheels=(--no-index --find-links "$folder")
    done
}

venv_with_pip() { # BASE: makes .venv where there is none
    [ -x "$python" ] || "$1" -m venv --clear "$root/.venv" ||
        venv_fail "could not make $root/.venv; see the lines above"
    "$python" -c 'import pip' 2>/dev/null || "$python" -m ensurepip >/dev/null 2>&1 ||
        venv_no_pip "$1"
}

venv_install() { # BASE
    local base=$1 wheels uv
    local quiet=(--quiet) # in a log only what goes wrong; on a terminal uv's bars
    if venv_finds_torch "$base"; then
        printf 'rackrun: installing the rest into %s; %s\n' "$root/.venv" \
            'RACKRUN_OWN_TORCH=1 installs the torch of the lock' >&2
    else
        "$base" -c 'import ensurepip, venv' 2>/dev/null || venv_no_pip "$base"
        if venv_has_own_torch; then
            printf 'rackrun: bringing %s up to date with its lock\n' "$root/.venv" >&2
        else
            printf 'rackrun: first use: installing PyTorch and the project into %s (a few minutes)\n' \
                "$root/.venv" >&2
            [ ! -t 2 ] || quiet=()
        fi
    fi
    venv_with_pip "$base"
    venv_wheels
    venv_find_uv "$base"
    # A lock is complete; nothing is looked for besides, such as a torch where one was found.
    venv_get --no-deps --require-hashes --only-binary :all: "${wheels[@]}" \
        "${locks[@]/#/--requirement=}"
    if [ -e "$root/pyproject.toml" ]; then
        # The project itself, built with the setuptools of the lock, which alone needs no hash.
        venv_get --no-deps --no-build-isolation --editable "$root"
    else # code that --sync brought from an installed rackrun
        venv_adds_project
    fi
}

venv_is_current() {
    local stamp=$1 wanted=$2
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && [ -x "$python" ] && venv_torch_is_there
}

venv_lock() { # prints the name of the lock that is asked for, or that .venv was made from, if any
    printf %s "${RACKRUN_LOCK:-$(cat "$root/.venv/lock" 2>/dev/null)}"
}

venv_want() { # LOCK: sets $locks, $stamp, and in $wanted what the stamp holds once all is there
    local extra project="$root/pyproject.toml"
    locks=("$root/requirements/$1.txt")
    stamp="$root/.venv/installed"
    for extra in "${extras[@]}"; do
        stamp+=-$extra
        locks+=("$root/requirements/$extra.txt")
    done
    case $1 in # others in requirements/ are for extras
        base | cuda12) ;;
        *) venv_fail "RACKRUN_LOCK: no lock of PyTorch is called $1; type base or cuda12" ;;
    esac
    [ -e "${locks[0]}" ] || venv_fail "${locks[0]} is missing; copy it from the repository"
    [ -e "$project" ] || project=/dev/null # an installed rackrun, brought by --sync
    wanted="$root $(cat "$project" "${locks[@]}" | cksum)"
}

# shellcheck disable=SC2120  # the start scripts name no extras
venv_python() { # EXTRAS...
    local stamp locks wanted lock extras=("$@")
    python="$root/.venv/bin/python"
    lock=$(venv_lock)
    venv_want "${lock:-base}"
    venv_is_current "$stamp" "$wanted" && return
    mkdir -p "$root/.venv"
    (
        flock 9 # a second first use waits for the first one
        lock=$(venv_lock)
        venv_want "${lock:-base}"
        venv_is_current "$stamp" "$wanted" || {
            base=${PYTHON:-python3}
            # No stamp: a task will want the rest.
            [ -z "${RACKRUN_OWN_COMMAND:-}" ] || ! venv_links_torch "$base" || exit 0
            venv_check_base "$base"
            lock=${lock:-$("$base" -P "$root/rackrun/cuda.py")}
            venv_want "$lock"
            # Of another lock no stamp is right any more, even if this installation fails.
            [ "$(cat "$root/.venv/lock" 2>/dev/null)" = "$lock" ] || rm -f "$root/.venv/installed"*
            venv_install "$base"
            printf '%s\n' "$lock" >"$root/.venv/lock"
            printf '%s' "$wanted" >"$stamp"
        }
    ) 9>"$root/.venv.lock" || exit
}

# For a command of the user's own in a project with a uv.lock: fills the project's environment, which
# keeps what else is in it, such as a package of an extra.
venv_project() { # FOLDER
    local base=${PYTHON:-python3} extras=() settings=() stamp locks wanted wheels uv
    python="$root/.venv/bin/python"
    venv_want base
    venv_wheels
    (
        flock 9 # a second run in the same folder waits for the first one
        command -v uv >/dev/null || {
            venv_check_base "$base"
            venv_with_pip "$base"
        }
        venv_find_uv "$base"
        ! "$base" -c 'import pip' 2>/dev/null ||
            settings=("$base" -I "$root/rackrun/launcher/files/pip_settings.py")
        printf 'rackrun: uv sync --frozen in %s\n' "$1" >&2 # torch alone takes a few minutes
        cd "$1" || exit
        "${settings[@]}" "$uv" sync --frozen --inexact --quiet >&2 ||
            venv_fail "uv sync --frozen failed in $1; see the lines above"
    ) 9>"$root/.venv.lock" || exit
}

venv_rackrun() { # SCRIPT WORDS...: becomes rackrun
    exec "$python" -P "$root/rackrun/__main__.py" "$@"
}
