#!/usr/bin/env bash
# A list of jobs on all GPUs of a machine, without Ray: one worker for every GPUS_EACH GPUs (1), with its share of the cores, takes
# the next job that nobody has taken. Workers outlive the shell that started them; a second call with the same folder only waits for them.
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
if ! mkdir -p "$folder/log" || ! mkdir "$folder/taken" 2> /dev/null; then echo "$folder has workers already: waiting for them"; else
  gpus=$(nvidia-smi -L 2> /dev/null | grep -c ^GPU); n=${GPUS_EACH:-1}
  workers=$((gpus / n > 0 ? gpus / n : 1)); cores=$(($(nproc) / workers))
  for ((w = 0; w < workers; w++)); do
    CUDA_VISIBLE_DEVICES=$(seq -s, $((w * n)) $((w * n + n - 1))) setsid taskset -c $((w * cores))-$((w * cores + cores - 1)) \
      bash "$0" "$jobs" "$folder" "$w" > "$folder/log/worker$w.txt" 2>&1 < /dev/null &
  done
fi
sleep 1
while pgrep -f "gpu_queue.sh $jobs $folder [0-9]" > /dev/null; do sleep 2; done
cat "$folder"/log/worker*.txt
