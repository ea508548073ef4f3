# Sourced by the scripts beside it: makes .venv in the repository's root with the extra named by $1, unless it is there;
# with $2, a Python's version, .venv-VERSION of that Python. Prints to stderr only. Sets $environment to its folder and
# $python to its interpreter.

root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
environment="$root/.venv"
python="$environment/bin/python"

say() { printf '%s\n' "$*" >&2; }

# $1: the version that it has to be; without, any that is new enough.
find_python() {
    if [ -n "${1:-}" ]; then
        for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1"*/bin/python3; do
            if "$candidate" -c "import sys; sys.exit(not sys.version.startswith('$1'))" 2>/dev/null; then
                printf '%s\n' "$candidate"
                return
            fi
        done
        say "There is no Python $1 here, neither on PATH nor among pyenv's versions."
        exit 1
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "Python 3.11 or newer is needed and was not found; install it and try again."
    exit 1
}

prepare() {
    extra=$1
    if [ -n "${2:-}" ]; then
        environment="$root/.venv-$2"
        python="$environment/bin/python"
    fi
    wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)
    stamp="$environment/.installed-$extra"
    if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if [ ! -x "$python" ]; then
        found=$(find_python "${2:-}") || exit 1
        say "Making $environment ..."
        "$found" -m venv "$environment" || {
            say "That needs Python's venv module; on Debian and Ubuntu: apt install python3-venv"
            exit 1
        }
    fi
    say "Installing federation-delivery[$extra] into $environment (the first time takes a minute) ..."
    "$python" -m pip install --quiet --disable-pip-version-check --constraint "$root/constraints.txt" \
        --editable "$root[$extra]" >&2 || exit 1
    printf '%s' "$wanted" >"$stamp"
}
