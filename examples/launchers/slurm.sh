#!/bin/bash
# SLURM: one task per GPU. A job that reaches its time limit saves, is requeued, and resumes.
#
#   cd examples/launchers && sbatch slurm.sh [arguments of train.py]
#
# 120 s before the limit SLURM sends SIGTERM to the tasks that srun started; train saves and exits with code 143, or 138
# after SIGUSR1 (--signal=USR1@120). A run that hangs exits with code 75. Any other exit code ends the job: an error would
# repeat.
#SBATCH --job-name=jstep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

srun --kill-on-bad-exit=0 python train.py "$@"
code=$?
if [ "$code" -eq 143 ] || [ "$code" -eq 138 ] || [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
