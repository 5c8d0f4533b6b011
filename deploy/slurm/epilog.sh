#!/bin/bash
# Slurm's Epilog: look at the GPUs of a job that has ended, before the next job gets them.
#
# slurmd drains the node if this exits with a code other than 0, with the reason "Epilog error". Therefore only a
# rejected GPU gives another code. A run without a verdict is logged: it says nothing about the hardware.
#
# slurm.conf:  Epilog=/etc/slurm/mgpu-check/epilog.sh
#              PrologEpilogTimeout=300
# Variables, in /etc/slurm/mgpu-check/settings:
#   MGPU_CHECK    the command, default mgpu-check
#   SECONDS_MOST  the run is ended after so many seconds, default 240; keep it below PrologEpilogTimeout
#   REPORTS       directory for reports, default /var/log/mgpu-check; without it there is no report
#   UNDECIDED     "drain" gives exit code 1 without a verdict, too; default "keep"
#   LEVEL         glance, quick, standard or long; default quick
#   SELECTION     checks to run, such as "inventory or health or links"; default all of the level
set -u
here=$(dirname "$(readlink -f "$0")")
# A script that calls this one has read the settings (SETTLED), and what it sets itself comes before them.
# shellcheck source=/dev/null
[ -z "${SETTLED:-}" ] && [ -r "$here/settings" ] && . "$here/settings"

gpus=${GPUS:-${SLURM_JOB_GPUS:-}}
[ -n "$gpus" ] || exit 0 # the job had no GPUs
[ "$gpus" = all ] || export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=$gpus

say() { logger -t mgpu-check -- "$*" 2>/dev/null || echo "mgpu-check: $*" >&2; }

command=${MGPU_CHECK:-mgpu-check}
if ! command -v "$command" >/dev/null; then
    say "job ${SLURM_JOB_ID:-?}: no verdict: $command is not installed"
    [ "${UNDECIDED:-keep}" = drain ] && exit 1
    exit 0
fi

verdict=$(mktemp) || exit 0 # a full disk is no fault of a GPU
trap 'rm -f "$verdict"' EXIT
reports=${REPORTS:-/var/log/mgpu-check}
options=(--gpus=all "--gpu-level=${LEVEL:-quick}" "--verdict-file=$verdict")
[ -n "${SELECTION:-}" ] && options+=(-k "$SELECTION")
[ -w "$reports" ] && options+=("--report=$reports/$(hostname -s)-${SLURM_JOB_ID:-0}.json")

# SIGTERM ends a run with its verdict, which the exit code does not show: a GPU that has failed by then is REJECTED.
cd / && timeout --signal=TERM --kill-after=15 "${SECONDS_MOST:-240}" "$command" accept "${options[@]}" >/dev/null 2>&1
code=$?
{ read -r word && read -r _ && read -r headline; } <"$verdict"
case ${word:-NONE} in
    ACCEPTED) exit 0 ;;
    REJECTED)
        say "job ${SLURM_JOB_ID:-?}: GPUs $gpus: $headline"
        exit 1
        ;;
    *)
        say "job ${SLURM_JOB_ID:-?}: GPUs $gpus: no verdict (exit code $code): ${headline:-$command accept ${options[*]}}"
        [ "${UNDECIDED:-keep}" = drain ] && exit 1
        exit 0
        ;;
esac
