#!/usr/bin/env bash
# What only a GPU can show: `bash bench/on_gpu.sh OUT PART...`, from the repository's root. Parts: tests check
# models loaded policy contexts kernels; with SmolLM2: clients, with PROMPTS=FILE,FILE too: text speed; on two GPUs:
# ranks. Each takes up to ten minutes on an H200; logs and results are in OUT, the end of every log is printed, and a failure
# does not stop the rest.
set -u
export PYTHONPATH="${PYTHONPATH:-}:." PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
out=$1
shift
mkdir -p "$out"

timed() { # name, seconds at most, lines to print, command
    local name=$1 seconds=$2 lines=$3 start=$SECONDS
    shift 3
    timeout "$seconds" "$@" > "$out/$name.log" 2>&1
    echo "=== $name: exit status $?, $((SECONDS - start)) s"
    tail -n "$lines" "$out/$name.log" | cut -c1-2000
}

latency() { # shape, seconds at most, drafts, more options
    local shape=$1 seconds=$2 drafts=$3
    shift 3
    timed "latency-$shape" "$seconds" 30 python3 -m specdec.tools.commands.main bench latency --shape "$shape" --drafts "$drafts" \
        --modes compiled --batches 1,8,32 --tokens 128 --ttft-tokens 512,2048 --new-tokens 65 --repeats 3 \
        --budget $((seconds - 40)) ${TOKENIZER:+--tokenizer "$TOKENIZER"} --out "$out" "$@"
}

tests() { # all but those that need no GPU, or two
    local files
    files=$(ls tests/test_*.py | grep -vE "tensor_parallel|ranks|train|test_page\.|test_bench|demo|readme|architecture|serve|compare")
    SPECDEC_TEST_GPUS=1 OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2 timed tests 570 80 python3 -m pytest -n 18 \
        --dist worksteal -p tests.told_at_once -q -W ignore --show-capture=no --tb=short --durations=10 $files
    grep -a "^=== tests/" "$out/tests.log" # what failed, though a run that is cut off sums up nothing
}

check() { # what attach takes with its kernels checked, and whether a check finds a wrong one
    timed attach 250 3 python3 bench/attach.py --shape 8b --processes 2 --out "$out"
    timed attach-checked 250 3 python3 bench/attach.py --shape 8b --processes 2 --check-kernels --out "$out"
    local wrong="import pytest; from specdec.backends.triton.recurrent import chunks; chunks.STATES['num_warps'] = 8
raise SystemExit(pytest.main(['-q', '--tb=line', 'tests/test_kernel_check.py', '-k', 'real_sizes']))"
    timed wrong-kernel 120 12 python3 -c "$wrong"
}

models() { # without transformers' own generate; a first attach takes up to two minutes
    latency 35b-a3b 260 plain,3:1:4 --algo nextn
    latency qwen3-next-12 160 plain,3:1:4 --algo nextn
    latency 30b-a3b 170 plain,3:1:4
}

loaded() { # models as people load them: quantised, with adapters, with images; MLA's latents at 32k
    timed quantised 280 40 python3 bench/quantised.py --out "$out"
    timed adapters 150 9 python3 bench/adapters.py --out "$out"
    timed images 130 12 python3 bench/images.py --out "$out"
    timed latents 150 6 python3 bench/latents.py --out "$out"
}

bench() { # name, seconds at most, lines to print, command of specdec bench
    local name=$1 seconds=$2 lines=$3
    shift 3
    timed "$name" "$seconds" "$lines" python3 -m specdec.tools.commands.main bench "$@" --out "$out/$name"
}

policy() { # num_steps="auto" beside plain decoding and every shape
    bench policy 300 8 policy --shape 8b --batches 1,8,32 --contexts 256,2048
    bench policy-large 290 8 policy --shape 8b --cells 256x256,128x256,64x256,64x2048
}

contexts() { # the same in long contexts
    bench policy-long 310 8 policy --shape 8b --cells 8x8192,32x8192,1x8192,8x16384,1x16384
}

text() { # the same on real text
    bench policy-text 120 8 policy --prompts "$PROMPTS" --batches 1,8,32,128 --new-tokens 128 --repeats 4 --topk 4 \
        --draft-tokens 24
}

speed() { # tokens/s of the shapes of EAGLE-3, or of DRAFT
    bench speed 240 90 acceptance --speed 1,8 --temperature 0,1 --prompts "$PROMPTS" --limit 80 --max-new-tokens 129 \
        --dtype bfloat16 --draft "${DRAFT:-smollm2-135m-instruct-eagle3}" \
        --shape 3:1:4,5:1:6,7:1:8,5:4:24,5:8:32,6:8:64,6:8:128
}

clients() { # of a server
    bench clients 160 12 serve --draft shipped --steps 3 --clients 8,32,64,256 --seconds 20 --warm-up 3
}

kernels() {
    timed kernels-35b 150 130 python3 bench/round_kernels.py --shape 35b-a3b --layers 8 --algo nextn --out "$out"
}

ranks() {
    timed ranks 300 20 python3 -m pytest -q -W ignore --tb=short tests/test_tensor_parallel.py tests/test_recurrent_ranks.py -k cuda
    local sharded=(torchrun --nproc-per-node 2 -m specdec.tools.commands.main bench latency --modes compiled --tokens 128 --out "$out")
    timed tp2-8b 240 25 "${sharded[@]}" --shape 8b --drafts plain,3:1:4 --batches 1,8,32 --budget 200
    timed tp2-70b 200 25 "${sharded[@]}" --shape 70b --drafts plain,3:1:4 --batches 1,8 --budget 160
    timed tp2-35b 200 25 "${sharded[@]}" --shape 35b-a3b --algo nextn --drafts plain,3:1:4 --batches 1,8 --budget 160
}

for part in "$@"; do "$part"; done
