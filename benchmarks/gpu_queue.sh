#!/usr/bin/env bash
# A list of jobs on the GPUs of a machine, without Ray: one worker for every GPUS_EACH GPUs (1) of GPUS (0,1,2,… of the machine), with its
# share of the cores, takes the next job that nobody has taken. Workers outlive the shell that started them; a second call with the same
# folder waits for them, and has workers of its own only on GPUs that are no worker's yet.
#   bash benchmarks/gpu_queue.sh JOBS FOLDER
# JOBS: a line a job, `NAME LIMIT_S COMMAND …`; {out} in it is FOLDER/NAME. A job that takes longer than LIMIT_S seconds is ended,
# and one whose name ends in _141gb is passed over on GPUs of less, one in _80gb on GPUs of more.
#   ladder 1500 python3 -m lorabench.sweep suite=predibase_ladder design=ladder output={out}
# A job that FOLDER/ended names, a line each, is not run.
# Lines may be added to JOBS while it runs, and nothing else: workers go on reading where they are.
# FOLDER/log has what each job printed, and what each worker did when. Where there are fewer GPUs than that there is one worker.
set -u
jobs=$(realpath "${1:?a file of jobs}"); folder=$(realpath -m "${2:?a folder}")
work() {
  local worker=$1 name limit command status mib other
  say() { echo "$(date +%T) worker $worker: $*"; }
  mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null | head -n 1)
  while read -r name limit command; do
    if [ "${mib:-0}" -lt 120000 ]; then other=_141gb; else other=_80gb; fi
    if [[ $name == *$other ]] || grep -qsx "$name" "$folder/ended"; then continue; fi
    if [ -z "$name" ] || [[ $name == \#* ]] || ! mkdir "$folder/taken/$name" 2> /dev/null; then continue; fi
    say "$name"
    timeout -k 20 "$limit" bash -c "${command//\{out\}/$folder/$name}" > "$folder/log/$name.txt" 2>&1 < /dev/null
    status=$?; say "$name ended with $status"
  done < "$jobs"
  say "no job is left"
}
if [ "${3:-}" ]; then work "$3"; exit; fi
mkdir -p "$folder/log" "$folder/taken"
count=$(nvidia-smi -L 2> /dev/null | grep -c ^GPU); count=$((count > 0 ? count : 1)); n=${GPUS_EACH:-1}; each=$((n < count ? n : count))
# Two threads of one core stand beside each other here, so that no two workers share a core.
read -ra threads <<< "$(python3 -c '
import os, pathlib
def core(thread):
    file = pathlib.Path(f"/sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list")
    return int(file.read_text().replace("-", ",").split(",")[0]) if file.exists() else thread
print(*sorted(os.sched_getaffinity(0), key=lambda thread: (core(thread), thread)))')"
[[ ${threads[*]} =~ ^[0-9\ ]+$ ]] || read -ra threads <<< "$(seq -s ' ' 0 $(($(nproc) - 1)))"
cores=$((${#threads[@]} * each / count)); cores=$((cores > 0 ? cores : 1))
IFS=, read -ra gpus <<< "${GPUS:-$(seq -s, 0 $((count - 1)))}"
for ((w = 0; w + each <= ${#gpus[@]}; w += each)); do
  own=("${gpus[@]:w:each}"); worker=$((own[0] / each))
  if ! mkdir "$folder/taken/worker$worker.of" 2> /dev/null; then echo "$folder has worker $worker already: waiting for it"; continue; fi
  CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${own[*]}") setsid taskset -c "$(IFS=,; echo "${threads[*]:worker * cores:cores}")" \
    bash "$0" "$jobs" "$folder" "$worker" > "$folder/log/worker$worker.txt" 2>&1 < /dev/null &
done
wait
while pgrep -f "gpu_queue.sh $jobs $folder [0-9]" > /dev/null; do sleep 2; done
cat "$folder"/log/worker*.txt
