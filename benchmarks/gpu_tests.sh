#!/usr/bin/env bash
# The GPU tests in parts beside one another, a log each with the environment it ran in: ten minutes on an H200, we predict.
#   bash benchmarks/gpu_tests.sh results/h200/gpu_tests
# Prints each part's counts and failures; the exit code is the number of parts that failed.
set -u
out=${1:?a folder for the logs}
cd "$(dirname "$0")/.."
tests=tests/lorakernels
part() {
  local name=$1; shift
  timeout "${LIMIT_S:-300}" python3 -m lorabench.log_command "$out/$name.log" \
    python3 -m pytest -m gpu -rfs --durations=10 -p no:cacheprovider "$@" > /dev/null 2>&1 &
  pids+=("$!")
}
files() { local name; for name in "$@"; do echo "$tests/test_$name.py"; done; }
pids=()
trap 'kill "${pids[@]}" 2> /dev/null; exit 143' TERM  # each part is a group of its own, which would outlive this script
mkdir -p "$out"
part a $(files gpu adapter float16 trainer linear_log_probs small_update) tests/ablations
part b $(files side_stream projection_node mlp_node nf4 linear geglu fp8 runtime multi multi_linear multi_lora multi_product job_columns own_columns own_rows wide_ranks)
part c $(files projection rope linear_cross_entropy tune trial_timing choice_cache)
part d $(files dropout fast_math rms_norm)
part e $(files lora_grad)
part f $(files concat_operand)
part g $(files swiglu)  # what a part compiles it compiles on one core
part l $(files long_context offloaded quantize_rows quantized_glu)
part h $(files capture_graphs capture_trainer) tests/train
part j -v tests/test_every_toggle.py -k steps-  # one sweep of sixty arms
part m -v tests/test_every_toggle.py -k 'not steps-'
part k tests/run/test_ranks.py  # of two GPUs
failed=0
finished() { local pid; for pid in "${pids[@]}"; do wait "$pid" || failed=$((failed + 1)); done; pids=(); }
finished
# What is judged by its times has the GPU for itself.
part i -v tests/zoo tests/measure/test_base.py tests/measure/test_copies.py tests/measure/test_memory.py tests/measure/test_seat.py tests/measure/test_energy.py tests/measure/test_edge.py tests/measure/test_fairness.py tests/measure/test_roofline.py tests/test_api.py
finished
grep -hE "passed|failed|^FAILED|^ERROR" "$out"/*.log
exit "$failed"
