#!/usr/bin/env bash
# Tests examples/launchers/slurm.sh on a local SLURM cluster: completion, errors, time limit with requeue, cancellation.
#
#   dev/slurm.sh            (Debian: apt-get install slurm-wlm munge; three to five minutes)
#
# Starts munged, slurmctld and slurmd in a temporary folder, and ends them. Skipped if they are not installed.
set -uo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin
for program in munged slurmctld slurmd sbatch; do
    command -v "$program" > /dev/null || { echo "skipped: $program is not installed"; exit 0; }
done
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
python=$(command -v "$python") || exit 1
[[ $python = /* ]] || python=$PWD/$python # jobs begin in the folder of the example

root=$(mktemp -d /tmp/slurm.XXXXXX)
host=$(hostname -s)
me=$(id -un)
export SLURM_CONF=$root/slurm.conf JAX_PLATFORMS=cpu PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$root"/{state,spool,bin}
chmod 755 "$root"
printf '#!/bin/sh\nexec "%s" "$@"\n' "$python" > "$root/bin/python" # slurm.sh calls `python`
chmod +x "$root/bin/python"
export PATH=$root/bin:$PATH

end() {
    scancel --user="$me" > /dev/null 2>&1
    sleep 1
    for pid in "$root"/*.pid; do
        [ -s "$pid" ] && kill "$(cat "$pid")"
    done
    sleep 1
    rm -rf "$root"
}
trap end EXIT

fail() {
    echo "FAILED: $*"
    tail -n 30 "$root"/*.out "$root"/slurmctld.log
    exit 1
}

wait_for() { # seconds, description, command …
    local left=$1 event=$2
    shift 2
    until "$@"; do
        left=$((left - 1))
        [ "$left" -gt 0 ] || fail "timed out: $event"
        sleep 1
    done
    echo "$event"
}

dd if=/dev/urandom of="$root/key" bs=1024 count=1 2> /dev/null
chmod 400 "$root/key"
munged --force --key-file="$root/key" --socket="$root/munge" --pid-file="$root/munged.pid" \
    --log-file="$root/munged.log" --seed-file="$root/seed" || fail munged
cat > "$SLURM_CONF" << END
ClusterName=here
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
AuthInfo=socket=$root/munge
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool
SlurmctldPidFile=$root/slurmctld.pid
SlurmdPidFile=$root/slurmd.pid
SlurmctldLogFile=$root/slurmctld.log
SlurmdLogFile=$root/slurmd.log
SlurmctldPort=$((20000 + $$ % 10000))
SlurmdPort=$((30000 + $$ % 2000))
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
END
slurmctld || fail slurmctld
slurmd || fail slurmd
ready() { [ "$(sinfo -h -o %t)" = idle ]; }
wait_for 60 "SLURM is ready" ready

submit() { # name, arguments of train.py; runs two tasks on this machine, otherwise with the options of the script
    sbatch --parsable -D "$PWD/examples/launchers" -o "$root/$1.out" --nodes=1 --ntasks-per-node=2 --gpus-per-node=0 \
        --time=3 examples/launchers/slurm.sh --checkpoint-dir "$root/$1" "${@:2}"
}
job_has() { scontrol show job "$1" | grep -q "$2"; }
restarts() { job_has "$1" "Restarts=$2 " || fail "job $1: expected $2 restarts"; }

job=$(submit short --steps 20)
wait_for 120 "a job of 20 steps is COMPLETED" job_has "$job" JobState=COMPLETED
grep -q "trained 20 steps on 2 processes" "$root/short.out" || fail "the output of the job"
restarts "$job" 0

job=$(submit wrong --steps many)
wait_for 120 "a job with a wrong argument is FAILED" job_has "$job" "JobState=FAILED"
restarts "$job" 0

job=$(submit long --steps 100000000)
wait_for 150 "SIGTERM stopped the job, which saved" grep -qs "SIGTERM stopped the run after step" "$root/long.out"
wait_for 60 "it is requeued" job_has "$job" "Restarts=1 "
stopped=$(sed -n 's/^SIGTERM stopped the run after step \([0-9]*\),.*/\1/p' "$root/long.out")
scontrol update JobId="$job" StartTime=now # otherwise SLURM waits two minutes
wait_for 240 "it resumed at step $stopped" grep -qs "^restored model-$stopped" "$root/long.out"
scancel "$job"
saved_again() { sed '1,/^restored/d' "$root/long.out" | grep -qs "SIGTERM stopped the run after step"; }
wait_for 120 "a job that is cancelled saves" saved_again
wait_for 60 "and is CANCELLED" job_has "$job" JobState=CANCELLED
restarts "$job" 1
echo "5 passed in $SECONDS s"
