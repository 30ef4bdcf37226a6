"""Group sampling of SmolLM2-135M on a CPU: ours beside `generate`, vLLM and llama.cpp.

16 prompts with groups of 8, so 128 rows, 48 forced new tokens, temperature 1 over the whole
vocabulary, weights in float32; llama.cpp reads the packaged GGUF (4 bits, which its kernels
unpack). Arms take three turns, since machines are slower at some minutes than at others; in each
an arm is a process of its own with one warm-up and one round. Medians.
`ours_loaded` has one busy loop beside it: `loaded_ratio` is its rate over ours.

    python -m tests.benchmarks.rl.rl_cpu

vLLM runs where `tests/vllm/install.sh` has put it, llama.cpp where `TFGRPO_XLLAMACPP` names a
Python with `xllamacpp`, an earlier version of ours where `TFGRPO_BEFORE` names its folder; a
missing arm is named, not guessed. `gemm_gflops` is what torch reaches in the largest product of a
layer, `model_gflops` the products of a whole step over our time for it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
COMMAND = "python -m tests.benchmarks.rl.rl_cpu"
QUESTIONS = [
    f"What is {a} times {b}? Explain each step of the calculation."
    for a, b in zip(range(7, 39, 2), range(33, 1, -2), strict=True)
]
GROUP, NEW, TURNS = 8, 48, 3
MARK = "tokens per second: "
ARMS = ("ours", "before", "ours_loaded", "generate", "vllm", "llama_cpp")
LAYERS, WIDTH, QKV, GATE_UP, DOWN, VOCABULARY = 30, 576, 960, 3072, 1536, 49_152
"""Of SmolLM2-135M, for the floating-point operations of a step."""


def timed(run: Callable[[], int]) -> float:
    """Return the tokens per second after a warm-up."""
    run()
    started = time.perf_counter()
    tokens = run()
    return tokens / (time.perf_counter() - started)


def prompts(tokenizer: Any) -> list[str]:
    """Return the questions as the chat template writes them."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False
        )
        for q in QUESTIONS
    ]


def ours() -> float:
    """The decoding loop behind `local:smollm2-135m`, with as many threads as cores are free."""
    from tfgrpo.lm.local.free_cores import FreeCores
    from tfgrpo.lm.local.loading import load_model
    from tfgrpo.lm.local.local_lm import make_generator

    loaded = load_model("smollm2-135m", device="cpu", dtype="float32")
    rows = GROUP * len(QUESTIONS)
    generator = make_generator(loaded, max_rows=rows, threads=FreeCores().count)
    return sampled(generator, loaded.tokenizer)


def before() -> float:
    """The version in the folder that `TFGRPO_BEFORE` names: 086e5b57~1 or one not much older."""
    from tfgrpo.lm.loading import load_model  # type: ignore[import-not-found,unused-ignore]
    from tfgrpo.rl.generator import make_generator  # type: ignore[import-not-found,unused-ignore]

    loaded = load_model("smollm2-135m", device="cpu", dtype="float32")
    rows = GROUP * len(QUESTIONS)
    return sampled(make_generator(loaded.model, loaded.tokenizer, max_rows=rows), loaded.tokenizer)


def sampled(generator: Any, tokenizer: Any) -> float:
    """Rates of a generator of any version."""
    from tfgrpo.protocols import Sampling

    ids = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in prompts(tokenizer)]
    sampling = Sampling(max_tokens=NEW, extra={"ignore_eos": True})
    seeds = [[100 * i + j for j in range(GROUP)] for i in range(len(ids))]

    def run() -> int:
        made = generator.generate(ids, GROUP, sampling, seeds)
        return sum(len(row.token_ids) for group in made for row in group)

    return timed(run)


def ours_loaded() -> float:
    """Ours with one busy loop beside it."""
    from tests.benchmarks.runs.bare import busy

    with busy(1):
        return ours()


def generate() -> float:
    """Hugging Face `generate`."""
    from tfgrpo.lm.local.loading import load_model

    loaded = load_model("smollm2-135m", device="cpu", dtype="float32")
    import torch

    tokenizer = loaded.tokenizer
    tokenizer.padding_side = "left"
    padded = tokenizer(
        prompts(tokenizer), add_special_tokens=False, padding=True, return_tensors="pt"
    )
    padded = {k: v.repeat_interleave(GROUP, 0) for k, v in padded.items()}

    def run() -> int:
        with torch.no_grad():
            out = loaded.model.generate(
                **padded, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=NEW, min_new_tokens=NEW,
            )  # fmt: skip
        return int((out.shape[1] - padded["input_ids"].shape[1]) * out.shape[0])

    return timed(run)


def vllm() -> float:
    """vLLM in its own process."""
    from vllm import LLM, SamplingParams

    from tfgrpo.lm.local.embedded import embedded_folder

    engine = LLM(str(embedded_folder()), dtype="float32", max_model_len=512, max_num_seqs=128)
    texts = prompts(engine.get_tokenizer())
    how = SamplingParams(n=GROUP, temperature=1.0, max_tokens=NEW, ignore_eos=True)

    def run() -> int:
        made = engine.generate(texts, how, use_tqdm=False)
        return sum(len(reply.token_ids) for one in made for reply in one.outputs)

    return timed(run)


def llama_cpp() -> float:
    """llama.cpp's server in this process, a request for each row, 128 slots."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = os.environ["TFGRPO_GGUF"]
    rows = GROUP * len(QUESTIONS)
    options.n_parallel, options.n_ctx = rows, 256 * rows
    options.n_batch = options.n_ubatch = 512
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = os.cpu_count() or 1
    options.sampling.ignore_eos = True
    server = xllamacpp.Server(options)

    def one(row: int) -> int:
        request = {
            "messages": [{"role": "user", "content": QUESTIONS[row // GROUP]}],
            "max_tokens": NEW, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
            "seed": row, "ignore_eos": True,
        }  # fmt: skip
        reply = server.handle_chat_completions(request)
        if "usage" not in reply:
            raise RuntimeError(f"llama.cpp refused a request: {reply}")
        return int(reply["usage"]["completion_tokens"])

    with ThreadPoolExecutor(rows) as pool:
        return timed(lambda: sum(pool.map(one, range(rows))))


def python_of(arm: str) -> str | None:
    """Return the Python that runs an arm, or None where its engine or version is not there."""
    from tests.benchmarks.rl.vllm_cpu import BIN, is_installed

    if arm == "vllm":
        return str(BIN / "python") if is_installed() else None
    if arm == "llama_cpp":
        return os.environ.get("TFGRPO_XLLAMACPP")
    return None if arm == "before" and "TFGRPO_BEFORE" not in os.environ else sys.executable


def measured(arm: str) -> float | str:
    """Run one arm in a process; its tokens per second, or why there are none."""
    from tests.benchmarks.rl.vllm_cpu import environment
    from tfgrpo.lm.local.embedded import find_gguf

    python = python_of(arm)
    if python is None:
        return "not installed"
    place = Path(os.environ["TFGRPO_BEFORE"]) if arm == "before" else ROOT
    done = subprocess.run(
        [python, str(Path(__file__)), arm],
        cwd=place,
        env=environment() | {"TFGRPO_GGUF": str(find_gguf()), "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"failed: {(done.stderr or done.stdout).strip()[-200:]}"
    said = [line for line in done.stdout.splitlines() if line.startswith(MARK)]  # engines talk, too
    return float(said[-1].removeprefix(MARK))


def gemm_gflops() -> float:
    """What torch reaches in the largest product of a layer, in 10⁹ operations per second."""
    import torch

    rows = GROUP * len(QUESTIONS)
    a, b = torch.randn(rows, WIDTH), torch.randn(GATE_UP, WIDTH)
    best = 0.0
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(10):
            torch.nn.functional.linear(a, b)
        best = max(best, 20 * rows * WIDTH * GATE_UP / (time.perf_counter() - started) / 1e9)
    return best


def main() -> None:
    """Measure and record."""
    from tests.benchmarks.record import record

    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    missing: dict[str, str] = {}
    for arm in ARMS * TURNS:
        found = missing[arm] if arm in missing else measured(arm)
        print(arm, found, file=sys.stderr, flush=True)
        if isinstance(found, str):
            missing[arm] = found
        else:
            rates[arm].append(found)
    median = {arm: statistics.median(r) for arm, r in rates.items() if r}
    layer = WIDTH * QKV + WIDTH * WIDTH + WIDTH * GATE_UP + DOWN * WIDTH
    operations = 2 * (LAYERS * layer + WIDTH * VOCABULARY)
    figures: dict[str, Any] = {f"{arm}_tok_s": round(rate, 1) for arm, rate in median.items()}
    for arm in ("before", "generate", "vllm", "llama_cpp"):
        if arm in median:
            figures[f"ratio_{arm}"] = round(median["ours"] / median[arm], 3)
    figures |= {
        "loaded_ratio": round(median["ours_loaded"] / median["ours"], 3),
        "gemm_gflops": round(gemm_gflops(), 1),
        "model_gflops": round(median["ours"] * operations / 1e9, 1),
        "rows": GROUP * len(QUESTIONS),
        "new_tokens": NEW,
        "cores": os.cpu_count(),
        "missing": missing,
        "all_tok_s": {arm: [round(x, 1) for x in r] for arm, r in rates.items()},
    }
    record("rl_cpu", figures, COMMAND)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(f"{MARK}{globals()[sys.argv[1]]()}", flush=True)
    else:
        main()
