#!/bin/bash
# Slurm's Prolog: a short look before a job starts. If this exits with another code than 0, slurmd drains the node and
# the job goes back into the queue.
#
# slurm.conf:  Prolog=/etc/slurm/mgpu-check/prolog.sh
# It is the epilog with fewer checks and less time; the settings are the same file.
here=$(dirname "$(readlink -f "$0")")
export SELECTION="inventory or health" SECONDS_MOST=${PROLOG_SECONDS_MOST:-45}
exec "$here/epilog.sh"
