# Sourced by the scripts beside it: makes .venv in the repository's root with the extra named by $1, unless it is there.
# Prints to stderr only. Sets $python to the environment's interpreter.

root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
python="$root/.venv/bin/python"

say() { printf '%s\n' "$*" >&2; }

find_python() {
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
    wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)
    stamp="$root/.venv/.installed-$extra"
    if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if [ ! -x "$python" ]; then
        found=$(find_python) || exit 1
        say "Making $root/.venv ..."
        "$found" -m venv "$root/.venv" || {
            say "That needs Python's venv module; on Debian and Ubuntu: apt install python3-venv"
            exit 1
        }
    fi
    say "Installing federation-delivery[$extra] into $root/.venv (the first time takes a minute) ..."
    "$python" -m pip install --quiet --disable-pip-version-check --constraint "$root/constraints.txt" \
        --editable "$root[$extra]" >&2 || exit 1
    printf '%s' "$wanted" >"$stamp"
}
