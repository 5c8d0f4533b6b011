#!/bin/bash
# Slurm's HealthCheckProgram: look at an idle node from time to time.
#
# slurmd ignores the exit code of this program and kills it after 60 seconds; draining is its own task. So this calls
# scontrol, and only if the node is to be drained.
#
# slurm.conf:  HealthCheckProgram=/etc/slurm/mgpu-check/health_check.sh
#              HealthCheckInterval=3600
#              HealthCheckNodeState=IDLE,CYCLE
set -u
here=$(dirname "$(readlink -f "$0")")
# shellcheck source=/dev/null
[ -r "$here/settings" ] && { set -a; . "$here/settings"; set +a; }
export SETTLED=1 GPUS=all SLURM_JOB_ID=idle LEVEL=glance SELECTION="${HEALTH_SELECTION:-inventory or health}" SECONDS_MOST=45
"$here/epilog.sh" && exit 0
scontrol update nodename="${SLURMD_NODENAME:-$(hostname -s)}" state=drain reason="mgpu-check: GPUs rejected"
