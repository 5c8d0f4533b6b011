#!/bin/bash
# Slurm's Prolog: a glance before a job starts. If this exits with another code than 0, slurmd drains the node and the
# job goes back into the queue.
#
# slurm.conf:  Prolog=/etc/slurm/mgpu-check/prolog.sh
# It is the epilog at the level glance and with less time; the settings are the same file. PROLOG_SELECTION there
# leaves out checks: "inventory or health" makes the GPUs compute and copy nothing.
here=$(dirname "$(readlink -f "$0")")
# shellcheck source=/dev/null
[ -r "$here/settings" ] && { set -a; . "$here/settings"; set +a; }
export SETTLED=1 LEVEL=glance SELECTION=${PROLOG_SELECTION:-} SECONDS_MOST=${PROLOG_SECONDS_MOST:-45}
exec "$here/epilog.sh"
