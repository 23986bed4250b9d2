#!/bin/bash
# Loader servers on CPU nodes and training on GPU nodes, as one heterogeneous job. README.md in this folder explains the
# design. Activate your Python environment before you submit the script in a folder that all nodes share:
#
#   sbatch slurm.sh
#
#SBATCH --time=24:00:00 --partition=cpu --nodes=2 --ntasks-per-node=1 --cpus-per-task=2
#SBATCH hetjob
#SBATCH --time=24:00:00 --partition=gpu --nodes=1 --ntasks-per-node=1 --cpus-per-task=2 --gpus-per-node=1
set -euo pipefail
umask 077 # other users must not read the token and the key, or add servers

job=$SLURM_SUBMIT_DIR/teleloader-$SLURM_JOB_ID
port=$((20000 + SLURM_JOB_ID % 10000)) # other jobs may use servers on the same node
rm -rf "$job" # remains if Slurm requeues the job after the failure of this node
mkdir "$job"
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -r "$job"' EXIT # end the servers

teleloader-server token add training --scope read --file "$job/tokens.toml" --out "$job/token"
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | sed 's/^/DNS:/' | paste -sd,)
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj /CN=teleloader \
    -addext "subjectAltName=$names" -addext keyUsage=critical,digitalSignature,keyCertSign \
    -keyout "$job/tls.key" -out "$job/tls.crt"

# the servers of other nodes continue if one fails
srun --het-group=0 --cpus-per-task="$SLURM_CPUS_PER_TASK_HET_GROUP_0" --kill-on-bad-exit=0 bash -c '
    exec teleloader-server my_package.data:train --announce "file://$1/servers" \
        --host 0.0.0.0 --port "$2" --advertise-url "https://$SLURMD_NODENAME:$2" \
        --tokens "$1/tokens.toml" --ssl-certfile "$1/tls.crt" --ssl-keyfile "$1/tls.key"
    ' bash "$job" "$port" &

export TELELOADER_TOKEN_FILE=$job/token TELELOADER_CA=$job/tls.crt
export LOADER_SERVERS=file://$job/servers # for RemoteDataset(os.environ["LOADER_SERVERS"], "train")
srun --het-group=1 --cpus-per-task="$SLURM_CPUS_PER_TASK_HET_GROUP_1" python train.py
