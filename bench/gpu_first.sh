#!/bin/bash
# First run on a GPU host, in parts of at most nine minutes each.
#
#   bench/gpu_first.sh tests      host facts, kernel tests in bfloat16, the captured step against the CPU
#   bench/gpu_first.sh sanitize   the kernels' tests under compute-sanitizer's memcheck
#   bench/gpu_first.sh real       a trained model, LOOM_TEST_MODEL=FILE.gguf, against the CPU; device failures
#   bench/gpu_first.sh kernels    checks and times kernels at real sizes, tunes the tiles of the MoE kernels
#   bench/gpu_first.sh steps      step time by kernel, both models, random weights
#   bench/gpu_first.sh table      the scenarios of bench.table; MODELS="qwen3-8b" for one model,
#                                 MODELS="" with tests: do not compile the models' kernels
#
# Results go to $OUT (./gpu-out), all logs into one archive there. Switches for debugging:
#   PDL=0       no programmatic dependent launch          FLAGS="--no-cuda-graphs ..."   of the server
#   CUDA_LAUNCH_BLOCKING=1, TRITON_CACHE_DIR, ...
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-$PWD/gpu-out}
MODELS=${MODELS-qwen3-30b-a3b qwen3-8b}
FLAGS="--device cuda ${FLAGS:-}"
# A start that chooses by itself would be measured without FA3 where that is not compiled yet.
if [ "${PDL:-1}" = 1 ] && python3 -c 'import flashinfer' 2> /dev/null; then
  FLAGS="--attention-backend prefill=flashinfer $FLAGS"
fi
CORES=$(nproc)
LOGS=$(mktemp -d)
mkdir -p "$OUT"
# Every test, whatever its marks, and no errors from warnings of the host's own packages.
export PYTEST="-p no:cacheprovider -m= -o filterwarnings=default --disable-warnings"
export LOGS COLUMNS=200 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
[ "${PDL:-1}" = 1 ] || sed -i 's/^HOPPER = (9, 0)/HOPPER = (99, 0)/' gpu/device.py

say() {
  printf '== %4d s  %s\n' "$SECONDS" "$*"
  tar czf "$OUT/logs.tgz" -C "$LOGS" .
}

# Compiles all kernels in parallel into Triton's cache, which the later processes use.
compile() {
  local pdl=()
  [ "${PDL:-1}" = 1 ] || pdl=(--no-pdl)
  for model in $MODELS; do
    timeout 150 python3 -m bench.kernels.whole_step "configs/models/$model" "${pdl[@]}" --jobs "$CORES" \
      > "$LOGS/compile-$model.log" 2>&1 || echo "compile of $model: exit $?"
    tail -n 1 "$LOGS/compile-$model.log"
  done
}

# One process for each line of quoted test names: a device fault ends only that process.
pytests() {
  xargs -d '\n' -P "$1" -I {} bash -c '
    eval "ids=($1)"
    log="$LOGS/pytest-$(basename "${ids[0]}" | tr -c "A-Za-z0-9\n" _).log"
    timeout "${EACH:-200}" python3 -m pytest $PYTEST --tb=short "${ids[@]}" > "$log" 2>&1 && code=0 || code=$?
    echo "$code ${ids[0]} $(tail -n 1 "$log")" >> "$LOGS/pytest.txt"' _ {}
}

# Lines for `pytests`: the tests of a model in one process, each configuration in its own.
cases() {
  python3 - <<'EOF'
from tests.rigs.tiny_model import VARIANTS
from tests.rigs.configurations import TINY_CONFIGURATIONS

def line(*names):
    print(*(f"'tests/gpu/test_cuda.py::test_{name}'" for name in names))

line("every_graph_is_its_work_bit_by_bit", "padding_changes_nothing")
line("blocks_are_near_and_graphs_change_nothing", "4_bits_are_near_and_graphs_change_nothing")
line("without_a_family_as_on_a_cpu", "mxfp4_is_near_and_graphs_change_nothing")
line("w8a8_is_near_and_graphs_change_nothing", "one_row_is_within_its_own_error")
line("long_prompts_are_scored_as_on_a_cpu", "no_launch_waits_for_the_device")
line("a_closed_executor_gives_its_memory_back", "graphs_that_nobody_holds_disturb_no_capture")
for depth in (0, 1, 2):
    line(f"graphs_change_nothing[{depth}]")
for name in VARIANTS:
    line(*(f"{test}[{name}]" for test in ("every_family_as_on_a_cpu", "sampling_as_on_a_cpu",
                                          "bfloat16_is_within_its_own_error")))
    line(*(f"8_bits_are_near_and_graphs_change_nothing[{name}-{what}]" for what in ("pages", "weights", "int8")))
for name in TINY_CONFIGURATIONS:
    line(f"text_is_the_same_in_every_configuration[{name}]")
EOF
}

tests() {
  say "facts"
  nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.max.sm --format=csv,noheader
  gcc --version | head -n 1; nproc; free -g | head -n 2 | tail -n 1; df -h /dev/shm | tail -n 1
  timeout 120 python3 -m bench.gpu_facts 2>&1 | tee "$LOGS/facts.log"
  say "compile"
  compile
  export OMP_NUM_THREADS=1
  : > "$LOGS/pytest.txt"
  say "kernel tests"
  ls tests/gpu/kernels/test_*.py | pytests $((CORES * 3 / 4))
  say "captured steps"
  cases | pytests $((CORES * 3 / 4))
  if [ "$SECONDS" -lt 420 ]; then
    say "a real model"
    timeout 110 python3 -m bench.step --name first-step --model configs/models/qwen3-8b --load-format dummy \
      --rows 1 32 --seconds 2 $FLAGS > "$LOGS/first-step.log" 2>&1 || echo "bench.step: exit $?"
    grep -E "^\{'case'|Error" "$LOGS/first-step.log" | cut -c 1-300
  fi
  say "failures"
  grep -hE "^(FAILED|ERROR) " "$LOGS"/pytest-*.log | cut -c 1-200 | sort | uniq -c | sort -rn | head -n 40
  grep -v "^0 " "$LOGS/pytest.txt" | cut -c 1-160
  echo "$(grep -c "^0 " "$LOGS/pytest.txt") of $(wc -l < "$LOGS/pytest.txt") groups passed"
  cat "$LOGS/facts.log"
}

# Four processes in parallel: three compute their expected output on the CPU first and share the cores.
real() {
  export OMP_NUM_THREADS=$((CORES / 3 + 1))
  : > "$LOGS/pytest.txt"
  python3 - <<'EOF' | pytests 4
from tests.rigs.configurations import REAL_CONFIGURATIONS

def line(*names):
    print(*(f"'tests/e2e/{name}'" for name in names))

names = [f"test_real_model.py::test_float32_matches_the_cpu[{name}]" for name in REAL_CONFIGURATIONS]
line("test_failure.py::test_a_step_that_fails[cuda]")
line(*names[0::2])
line(*names[1::2])
line(*(f"test_real_model.py::test_bfloat16_answers_are_plausible[{name}]" for name in ("triton", "flashinfer")))
EOF
  cut -c 1-160 "$LOGS/pytest.txt"
}

# Without torch's caching allocator every tensor is its own allocation, so memcheck sees accesses past its end.
sanitize() {
  export LOGS PYTORCH_NO_CUDA_MEMORY_CACHING=1
  ls ${FILES:-tests/gpu/kernels/test_*.py} | xargs -P "$CORES" -I {} bash -c '
    log="$LOGS/sanitize-$(basename {} .py).log"
    timeout "${EACH:-200}" compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 5 \
      python3 -m pytest $PYTEST --tb=line {} > "$log" 2>&1
    echo "$? {} $(grep -hE "passed|failed" "$log" | tail -n 1) $(grep -h "ERROR SUMMARY" "$log" | tail -n 1)"'
}

kernels() {
  timeout 530 python3 -m bench.kernels.check_and_time --out "$OUT" --tune 768 --quick --seconds 480 \
    > "$LOGS/kernels.log" 2>&1 || echo "check_and_time: exit $?"
  say "failed checks, dropped variants"
  grep -E "^BAD|dropped|failed|aborted" "$LOGS/kernels.log" | cut -c 1-200 | head -n 30
  say "times"
  grep -E "of peak|checks:|^-- " "$LOGS/kernels.log" | cut -c 1-150
}

steps() {
  compile
  for model in $MODELS; do
    say "$model"
    timeout 240 python3 -m bench.step --name "step-$model" --model "configs/models/$model" \
      --load-format dummy --context-length 16384 --seconds 3 $FLAGS > "$LOGS/step-$model.log" 2>&1 \
      || echo "bench.step: exit $?"
    cp "bench/results/step-$model.json" "$OUT/" 2>/dev/null
  done
  for model in $MODELS; do
    echo "$model"
    grep -E "Error|memory|KV pool|weights  " "$LOGS/step-$model.log" | cut -c 1-160 | tail -n 8
    grep -E "^\{'case'" "$LOGS/step-$model.log" | cut -c 1-420
  done
}

table() {
  compile
  for model in $MODELS; do
    say "$model"
    timeout 250 python3 -m bench.table --model "configs/models/$model" --name "h200-$model" \
      --note "${NOTE:-first run}" --out "$LOGS/table" $FLAGS > "$LOGS/table-$model.log" 2>&1 \
      || echo "bench.table: exit $?"
    tail -n 30 "$LOGS/table-$model.log" | cut -c 1-200
    grep -hE "ERROR|Error|failed" "$LOGS"/table/history/*.log | cut -c 1-200 | tail -n 5
  done
  cp "$LOGS"/table/*.json "$OUT/" 2>/dev/null
}

"${1:?tests, sanitize, real, kernels, steps or table}"
say "done"
