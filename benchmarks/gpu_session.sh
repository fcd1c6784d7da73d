#!/usr/bin/env bash
# A session on a GPU machine that has no package index and may be gone at any time: install, run lists of jobs, pack what is there.
#   bash benchmarks/gpu_session.sh SECONDS PACK     (in a checkout, beside which nothing else is needed)
# .whl/ has the wheels that the machine lacks, .clone/ a clone of the commit to measure (git clone --no-checkout --depth 1).
# .real/ may have archives (.tgz) of real text and a tokenizer, for jobs that name $REAL.
# .more/ may have, in any call, archives (.whl, .tar.xz) of packages that are too large to travel with the others: they are
# unpacked beside those, once each, before the call's lists are read.
# .pack/ may have the PACK of a machine that was lost: what had ended there is not run again, and what had not goes on.
# The first call on a machine installs both, then runs the lists of benchmarks/gpu_jobs by gpu_queue.sh, in the order of their names, which say how many
# GPUs a job takes, with as many jobs beside each other as the machine has room for. Of four GPUs a list for two has the last two, and the list for one
# behind it begins beside it. A later call goes on waiting. It adds the lines that the lists have more, which run in a checkout of the commit that .clone has
# then, and what the lists have no more is not begun; a job whose command is another needs another name. So all calls may be sent at once: where no machine
# came for the first one, the next one begins, and what the first jobs bring to light is mended for those behind them.
# Each ends after SECONDS or when all is done, and leaves folders and logs so far in PACK (a .tgz).
set -u
seconds=${1:?seconds}; pack=$(realpath -m "${2:?a file}"); here=$PWD; at=${AT:-/tmp/gpu_session}
# The second folder is what a .pth file of nvidia-cutlass-dsl names, which Python reads in none but its own folders.
export PYTHONPATH=$at/site:$at/site/nvidia_cutlass_dsl/dsl_packages PATH=$at/site/bin:$PATH HF_HUB_OFFLINE=1
# Whoever starts the session may move real weights there while it runs, whole: what is not there yet is not passed over.
export REAL=$at/real LORABENCH_GGUF=$at/real/SmolLM2-135M-Instruct.Q4_1.gguf
unset PYTHONDONTWRITEBYTECODE  # or every worker process compiles each package that it imports
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
ends=$(($(date +%s) + seconds))
unpack_more() {
  local archive
  mkdir -p "$at/more"
  for archive in "$here"/.more/*; do
    if [ ! -f "$archive" ] || ! mkdir "$at/more/$(basename "$archive")" 2> /dev/null; then continue; fi
    python3 -c '
import shutil, sys
archive, site = sys.argv[1:]
shutil.unpack_archive(archive, site, "zip" if archive.endswith(".whl") else None)' "$archive" "$at/site" ||
      rmdir "$at/more/$(basename "$archive")"  # the next call tries it again
  done
}
if [ ! -d "$at/src" ]; then
  mkdir -p "$at/out" "$REAL"
  for archive in "$here"/.real/*.tgz; do
    [ ! -f "$archive" ] || tar xzf "$archive" -C "$REAL"
  done
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$at/site" "$here"/.whl/*.whl
  python3 -m compileall -q -j 0 "$at/site" "$(python3 -c 'import torch; print(torch.__path__[0] + "/..")')" > /dev/null 2>&1
  unpack_more
  git clone -q "file://$here/.clone" "$at/src" && cd "$at/src" || exit 3
  python3 -m pip install -q --no-index --no-deps --no-build-isolation -e ./kernels -e .
  mkdir -p "$at/seen"
  cp "$here"/benchmarks/gpu_jobs/*.txt "$at"
  cp "$here"/benchmarks/gpu_jobs/*.txt "$at/seen"
  for pack_before in "$here"/.pack/*.tgz; do
    [ ! -f "$pack_before" ] || tar xzf "$pack_before" -C "$at"
  done
  for folder in "$at"/out/*/; do
    [ -d "$folder" ] || continue
    sed -n 's/.*worker [0-9]*: \(.*\) ended with .*/\1/p' "$folder"/log/worker*.txt >> "$folder/ended"
    rm -rf "$folder/taken"
  done
  setsid bash -c '
    at=$1; gpus=$(nvidia-smi -L 2> /dev/null | grep -c ^GPU)
    beside=  # the process that waits for a list for two GPUs
    queue() { GPUS_EACH=$n bash benchmarks/gpu_queue.sh "$list" "$at/out/$(basename "$list" .txt)" > /dev/null; }
    for list in "$at"/*_gpu*.txt; do
      case $list in *_four_*) n=4 ;; *_two_*) n=2 ;; *) n=1 ;; esac
      [ "$gpus" -ge "$n" ] || continue
      if [ "$n" = 1 ] && [ "$beside" ]; then GPUS=0,1 queue & fi
      [ -z "$beside" ] || wait "$beside"
      beside=
      if [ "$n" = 2 ] && [ "$gpus" -ge 4 ]; then GPUS=2,3 queue & beside=$!; else queue; fi
    done
    wait
    touch "$at/done"' _ "$at" > /dev/null 2>&1 < /dev/null &
else
  unpack_more
  own=$(git -C "$at/src" rev-parse HEAD 2> /dev/null) now=$(git -C "$here/.clone" rev-parse HEAD 2> /dev/null) src=$at/src-$now there=
  if [ "$own" != "$now" ]; then
    if [ ! -d "$src" ] && git clone -q "file://$here/.clone" "$src"; then
      mkdir -p "$src-names" && ln -sfn "$src/ablations" "$src-names/lorabench_ablations"
    fi
    there="cd $src \\&\\& export PYTHONPATH=$src:$src/kernels:$src-names:\$PYTHONPATH \\&\\& "
  fi
  for list in "$here"/benchmarks/gpu_jobs/*.txt; do
    name=$(basename "$list" .txt); seen=$at/seen/$name.txt; touch "$seen"
    mkdir -p "$at/out/$name/taken"
    grep -vxFf "$list" "$seen" | grep -v '^#' | while read -r job _; do
      grep -q "^$job " "$list" || mkdir "$at/out/$name/taken/$job" 2> /dev/null
    done
    grep -vxFf "$seen" "$list" | grep -v '^#' | sed "s|^\([^ ]* [0-9]*\) |\1 $there|" >> "$at/$name.txt"
    cp "$list" "$seen"
  done
fi
while [ "$(date +%s)" -lt "$ends" ] && [ ! -e "$at/done" ]; do sleep 1; done
tar czf "$pack" --exclude='*.safetensors' -C "$at" out
cat "$at"/out/*/log/worker?.txt 2> /dev/null
for log in "$at"/out/*/log/*.txt; do
  [ -f "$log" ] && [[ $log != */worker?.txt ]] && echo "== $log" && tail -c 1500 "$log" | tr '\r' '\n' | tail -n 12 | cut -c1-200
done | tail -c 9000
git -C "$at/src" status --short | head -n 5  # what makes a record say that its checkout was changed
nvidia-smi --query-gpu=name,memory.used,utilization.gpu --format=csv,noheader 2> /dev/null
