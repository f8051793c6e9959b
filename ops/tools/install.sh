#!/usr/bin/env bash
# Makes .venv and installs this project into it, editable, with the extras given, at the versions of constraints.txt.
#
#     ops/tools/install.sh gateway,worker,embedded
#
# PYTHON names the interpreter to use; otherwise the first that fits is found. pip's own output goes to a log.
set -euo pipefail
cd "$(dirname "$0")/../.."
extras=${1:?usage: ops/tools/install.sh EXTRAS}
venv=.venv
log=$venv/install.log

fits() { "$@" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' >/dev/null 2>&1; }

fail() {
  echo "setup: $*" >&2
  exit 1
}

# --- a virtual environment --------------------------------------------------------------------------------------------

if ! { fits $venv/bin/python && $venv/bin/python -m pip --version >/dev/null 2>&1; }; then
  python=
  for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
    if fits "$candidate"; then
      python=$candidate
      break
    fi
  done
  [ -n "$python" ] || fail "Quire needs Python 3.11 or 3.12, and ${PYTHON:-python3} is $(${PYTHON:-python3} --version 2>&1 |
    head -n 1 || true); install one (Debian: apt install python3.11 python3.11-venv) or name it: make run PYTHON=/path/to/python3.11"
  echo "Making $venv with $("$python" --version 2>&1)"
  rm -rf $venv
  if ! said=$("$python" -m venv $venv 2>&1); then
    rm -rf $venv
    fail "$python cannot make a virtual environment: $(echo "$said" | grep -v '^$' | tail -n 1)
  On Debian and Ubuntu: apt install python3-venv"
  fi
fi

# --- the packages -----------------------------------------------------------------------------------------------------

# The compiler needs no package, so the kernels are compiled while pip downloads. `make` waits for the end of this build.
$venv/bin/python kernels/cpu/build.py >/dev/null 2>&1 &
kernels=$!

echo "Installing quire[$extras]; the first time this takes minutes, most of them for torch (log: $log)"
# The environment variable reaches the isolated build of the project too; newer versions of pip have a name of its own for that.
: >$log
export PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
# pip would compile all modules in one process, which takes half of its time.
$venv/bin/python -m pip install --no-input --progress-bar off --no-compile -e ".[$extras]" >$log 2>&1 &
pip=$!
trap 'kill $pip $kernels 2>/dev/null; exit 130' INT TERM

started=$SECONDS shown= last_report=$SECONDS
steps() { grep -aoE '^ *(Collecting|Downloading|Building|Installing collected|Preparing) .*' $log | tail -n 1 || true; }
line() { printf '  %d s  %s' $((SECONDS - started)) "${step#"${step%%[! ]*}"}"; }
while kill -0 $pip 2>/dev/null; do
  step=$(steps)
  if [ -t 1 ]; then
    shown=$(line) width=$(($(tput cols 2>/dev/null || echo 80) - 1))
    printf '\r\033[2K%s' "${shown:0:width}"
    sleep 0.3
  else
    if [ "$step" != "$shown" ] && [[ $step =~ ([0-9]{2,}\.[0-9]\ MB|Installing\ collected) ]]; then
      line | cut -c 1-120
      shown=$step last_report=$SECONDS
    elif [ $((SECONDS - last_report)) -ge 30 ]; then
      line | cut -c 1-120
      last_report=$SECONDS
    fi
    sleep 1
  fi
done
[ -t 1 ] && printf '\r\033[2K'
if ! wait $pip; then
  grep -avE '^(Looking in|Requirement already|WARNING: Location|Collecting|Obtaining|  [A-Z])' $log | tail -n 15 >&2
  fail "the installation failed; the whole output is in $log"
fi
$venv/bin/python -m compileall -q -j 0 $venv/lib/python3*/site-packages >>$log 2>&1 || true
echo "Installed in $((SECONDS - started)) s"
