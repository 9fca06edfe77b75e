#!/bin/sh
# Puts toki at a stable place for this user and a `toki` command on PATH.
#
#   ./install.sh                 install, or upgrade what is there
#   ./install.sh --offline DIR   take toki.py (and name engine and model) from DIR
#   ./install.sh --uninstall     stop toki and remove the program; --purge: also state
#   ./install.sh --help
#
# Needs a Python >= 3.9 and nothing else: no root, no network.  Nothing is started and
# nothing downloaded unless you say yes.
set -eu
umask 022

main() {
    share="${XDG_DATA_HOME:-$HOME/.local/share}/toki"
    bin="${XDG_BIN_HOME:-$HOME/.local/bin}"
    offline='' sum='' act=install purge='' yes='' python=''
    while [ $# -gt 0 ]; do
        case $1 in
            --offline) [ $# -gt 1 ] || fail "--offline needs a folder"
                offline=$2; shift ;;
            --sha256) [ $# -gt 1 ] || fail "--sha256 needs 64 hex digits"
                sum=$2; shift ;;
            --uninstall) act=uninstall ;;
            --purge) purge=1 ;;
            --yes) yes=1 ;;
            -h | --help) usage; return 0 ;;
            *) fail "unknown option $1" "./install.sh --help" ;;
        esac
        shift
    done
    if [ -n "$purge" ] && [ "$act" != uninstall ]; then
        fail "--purge belongs to --uninstall" "./install.sh --uninstall --purge"
    fi
    if [ "$act" = uninstall ]; then uninstall; else install_toki; fi
}

usage() {
    cat <<'END'
usage: ./install.sh [--offline DIR] [--sha256 HEX] [--yes]
       ./install.sh --uninstall [--purge]

  --offline DIR  take toki.py from DIR; an engine and a GGUF file there are named in the
                 line that starts toki
  --sha256 HEX   what toki.py must have; a SHA256SUMS file beside it is checked anyway
  --yes          run `toki up --yes` at the end (fetches what is missing)
  --uninstall    stop toki, remove its service and program; state and models stay
  --purge        with --uninstall: remove state, models and settings as well

Variables: TOKI_PYTHON (which Python), TOKI_EXTRAS=numpy (adds it to a folder of toki's
own), XDG_DATA_HOME, XDG_BIN_HOME, TOKI_STATE_DIR.
END
}

fail() {
    printf 'install.sh: %s\n' "$1" >&2
    [ $# -lt 2 ] || printf '  try: %s\n' "$2" >&2
    exit 1
}

# step N OF TEXT: a bar that stays, so that what programs print streams below it.
step() {
    bar='' i=0
    while [ "$i" -lt "$2" ]; do
        if [ "$i" -lt "$1" ]; then bar="$bar####"; else bar="$bar...."; fi
        i=$((i + 1))
    done
    if [ -t 1 ] && [ -z "${NO_COLOR:-}" ] && [ "${TERM:-dumb}" != dumb ]; then
        printf '\033[33m[%s]\033[0m %s\n' "$bar" "$3"
    else
        printf '[%s/%s] %s\n' "$1" "$2" "$3"
    fi
}

# Is this a whole Python >= 3.9?  Prints the interpreter itself: no shim, no venv.
real_python() {
    "$1" -I -c '
import sys
if sys.version_info < (3, 9):
    sys.exit(1)
import ctypes, hashlib, http.server, json, sqlite3, ssl, zlib
print(getattr(sys, "_base_executable", None) or sys.executable)' 2>/dev/null
}

find_python() {
    tried=''
    for name in "${TOKI_PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 \
        python3.10 python3.9 /opt/homebrew/bin/python3 /usr/local/bin/python3 \
        "$HOME/.local/bin/python3" /usr/bin/python3; do
        [ -n "$name" ] || continue
        path=$(command -v "$name" 2>/dev/null) || continue
        # Without the Command Line Tools this one opens a dialog instead of running.
        if [ "$path" = /usr/bin/python3 ] && [ "$(uname -s)" = Darwin ] &&
            ! xcode-select -p >/dev/null 2>&1; then
            continue
        fi
        if python=$(real_python "$path") && [ -n "$python" ]; then return 0; fi
        version=$("$path" -I -c 'import sys; print(sys.version.split()[0])' \
            2>/dev/null) || version='does not run'
        tried="$tried $path ($version);"
        [ "$name" != "${TOKI_PYTHON:-}" ] || break
    done
    fail "no Python 3.9 or newer with ssl, sqlite3 and zlib was found${tried:+:$tried}" \
        "install python3, or TOKI_PYTHON=/path/to/python3 ./install.sh"
}

sha256_of() {
    "$python" -I -c 'import hashlib, sys
print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$1"
}

check_sum() {
    folder=$(dirname "$1")
    if [ -z "$sum" ] && [ -f "$folder/SHA256SUMS" ]; then
        sum=$(sed -n 's/^\([0-9a-fA-F]\{64\}\) [ *]\(\.\/\)\{0,1\}toki\.py$/\1/p' \
            "$folder/SHA256SUMS" | head -n 1)
    fi
    [ -n "$sum" ] || return 0
    got=$(sha256_of "$1")
    want=$(printf '%s' "$sum" | tr 'A-F' 'a-f')
    [ "$got" = "$want" ] || fail "$1 has sha256 $got, expected $want: nothing was changed" \
        "get the file again"
    echo "checksum: $got"
}

# A word that sh reads back as it is, whatever is in it.
quoted() { printf "'%s'" "$(printf '%s' "$1" | sed "s/'/'\\\\''/g")"; }

# Folders on the way that are not there yet: uninstalling removes them if empty.
missing_folders() {
    for folder in "$share" "$bin" "${XDG_STATE_HOME:-$HOME/.local/state}" \
        "${XDG_CONFIG_HOME:-$HOME/.config}"; do
        while [ ! -d "$folder" ] && [ "$folder" != "$(dirname "$folder")" ]; do
            printf '%s\n' "$folder"
            folder=$(dirname "$folder")
        done
    done
}

place_program() {
    # Imported, not run as a script, so that Python keeps the compiled file.
    start='import sys; sys.path.insert(0, sys.argv.pop(1)); import toki'
    start="$start; sys.exit(toki.main())" flags='-I'
    mkdir -p "$share" "$bin"
    [ -f "$share/.folders" ] || [ -z "$made" ] || printf '%s\n' "$made" >"$share/.folders"
    if [ -f "$share/toki.py" ] && cmp -s "$1" "$share/toki.py"; then
        echo "toki.py: up to date"
    else
        rm -rf "$share/.new"
        mkdir "$share/.new"
        cp "$1" "$share/.new/toki.py"
        "$python" -I -X utf8 -c "$start" "$share/.new" version >/dev/null ||
            { rm -rf "$share/.new"; fail "$1 does not run with $python"; }
        if [ -f "$share/toki.py" ]; then mv -f "$share/toki.py" "$share/toki.py.prev"; fi
        mv -f "$share/.new/toki.py" "$share/toki.py"
        # What Python compiled for the trial is right for the file in its place, too.
        rm -rf "$share/__pycache__"
        mv "$share/.new/__pycache__" "$share" 2>/dev/null || true
        rm -rf "$share/.new"
        echo "toki.py: $share/toki.py"
    fi
    {
        echo '#!/bin/sh'
        echo '# toki launcher, written by install.sh'
        if [ -d "$share/extras" ]; then
            printf 'PYTHONPATH=%s\nexport PYTHONPATH\n' "$(quoted "$share/extras")"
            flags='-s'
        fi
        printf 'exec %s %s -X utf8 -c %s %s "$@"\n' "$(quoted "$python")" "$flags" \
            "$(quoted "$start")" "$(quoted "$share")"
    } >"$bin/.toki.new"
    chmod 755 "$bin/.toki.new"
    if [ -f "$bin/toki" ] && ! grep -q 'written by install.sh' "$bin/toki"; then
        rm -f "$bin/.toki.new"
        fail "$bin/toki is there and not from this installer" \
            "move it away, or XDG_BIN_HOME=DIR ./install.sh"
    fi
    mv -f "$bin/.toki.new" "$bin/toki"
    echo "command: $bin/toki"
}

add_extras() {
    for package in $(printf '%s' "${TOKI_EXTRAS:-}" | tr ',' ' '); do
        [ "$package" = numpy ] || fail "TOKI_EXTRAS knows numpy only, not $package"
        echo "numpy goes to $share/extras (optional: toki never needs it)"
        mkdir -p "$share"
        "$python" -m pip install --no-cache-dir --upgrade --target "$share/extras" "$package" ||
            fail "numpy was not installed; everything else works without it" \
                "./install.sh without TOKI_EXTRAS"
    done
}

path_hint() {
    case ":$PATH:" in
        *":$bin:"*)
            first=$(command -v toki 2>/dev/null || true)
            if [ -n "$first" ] && [ "$first" != "$bin/toki" ]; then
                echo "note: $first comes before $bin/toki on PATH"
            fi ;;
        *)
            case ${SHELL:-} in
                */fish) echo "PATH: run this once: fish_add_path $(quoted "$bin")" ;;
                */zsh) rc=.zshrc; line_for ;;
                *) rc=.profile; line_for ;;
            esac ;;
    esac
}

line_for() {
    echo "PATH: $bin is not on it; this line adds it for new shells:"
    printf "  echo 'export PATH=\"%s:\$PATH\"' >> ~/%s\n" "$bin" "$rc"
}

# The line that starts toki, with what an offline folder holds.
start_words() {
    words=up
    if [ -n "$offline" ]; then
        for file in "$offline"/llama-server "$offline"/*/llama-server; do
            if [ -f "$file" ]; then words="$words --engine-bin $(quoted "$file")"; break; fi
        done
        for file in "$offline"/*.gguf; do
            if [ -f "$file" ]; then words="$words --model $(quoted "$file")"; break; fi
        done
    fi
    printf '%s' "$words"
}

install_toki() {
    source=${offline:-$(cd "$(dirname "$0")" && pwd)}
    [ -z "$offline" ] || [ -d "$offline" ] || fail "--offline $offline is no folder"
    if [ -n "$offline" ]; then offline=$(cd "$offline" && pwd); source=$offline; fi
    [ -f "$source/toki.py" ] || fail "there is no toki.py in $source" \
        "run install.sh from the folder that holds toki.py, or --offline DIR"
    [ "$(id -u)" != 0 ] || echo "note: this installs for root only; no root is needed"
    step 1 4 "finding Python"
    find_python
    echo "python: $python"
    step 2 4 "checking toki.py"
    check_sum "$source/toki.py"
    step 3 4 "installing for $(id -un)"
    made=$(missing_folders)
    add_extras
    place_program "$source/toki.py"
    step 4 4 "done: $("$bin/toki" version)"
    path_hint
    words=$(start_words)
    if [ -z "$yes" ] && [ -t 0 ] && [ -t 1 ]; then
        printf 'start toki now? It fetches an engine and a model if there are none [y/N] '
        read -r answer || answer=''
        case $answer in y | Y | yes | Yes | YES) yes=1 ;; esac
    fi
    if [ -n "$yes" ]; then
        eval "\"\$bin/toki\" $words --yes"
    else
        echo "start it: toki $words"
    fi
}

# Ends service and daemon (what they say goes to stderr); prints the folders of state and
# settings, as the program itself knows them.
stop_toki() {
    "$python" -I -B -c '
import contextlib, os, sys
sys.path.insert(0, sys.argv[1])
import toki
with contextlib.redirect_stdout(sys.stderr):
    toki.main(["service", "remove"])
    toki.main(["down"])
where = toki.places(dict(os.environ), os.environ.get("TOKI_STATE_DIR", ""))
print(where.state)
print(os.path.dirname(where.config_file))' "$share"
}

# Refuses to purge a home folder, what holds one, and what does not look like toki's.
may_purge() {
    [ -d "$1" ] || return 0
    case "$HOME/" in "${1%/}"/*) fail "$1 holds your home: not removed" ;; esac
    case $1 in
        */toki) ;;
        *) [ -e "$1/token" ] || [ -e "$1/daemon.lock" ] || [ -d "$1/engines" ] ||
            [ -d "$1/logs" ] || fail "$1 does not look like toki's state: not removed" ;;
    esac
}

purge_folder() {
    [ -d "$1" ] || return 0
    du -sh "$1" 2>/dev/null | sed 's/^/removing /'
    rm -rf "$1"
}

# Children stand behind their parents in the list, so its end goes first.
drop_empty() {
    printf '%s\n' "$1" | LC_ALL=C sort -ru | while IFS= read -r folder; do
        [ -z "$folder" ] || rmdir "$folder" 2>/dev/null || true
    done
}

uninstall() {
    step 1 3 "stopping toki"
    state='' config=''
    if [ -f "$share/toki.py" ]; then
        find_python
        places=$(stop_toki) || places=''
        state=$(printf '%s\n' "$places" | sed -n 1p)
        config=$(printf '%s\n' "$places" | sed -n 2p)
    fi
    if [ -n "$purge" ]; then
        for folder in "$state" "$config"; do
            [ -z "$folder" ] || may_purge "$folder"
        done
    fi
    step 2 3 "removing the program"
    if [ -f "$bin/toki" ] && grep -q 'written by install.sh' "$bin/toki"; then
        rm -f "$bin/toki"
        echo "removed: $bin/toki"
    fi
    made=$(cat "$share/.folders" 2>/dev/null) || made=''
    rm -f "$share/toki.py" "$share/toki.py.prev" "$share/.folders"
    rm -rf "$share/extras" "$share/__pycache__" "$share/.new"
    if [ -n "$purge" ]; then
        for folder in "$state" "$config"; do
            [ -z "$folder" ] || purge_folder "$folder"
        done
    elif [ -n "$state" ] && [ -d "$state" ]; then
        if rmdir "$state" 2>/dev/null; then :; else
            du -sh "$state" 2>/dev/null | sed 's/^/kept (--purge removes it): /'
        fi
    fi
    drop_empty "$share
$made"
    step 3 3 "uninstalled"
}

main "$@"
