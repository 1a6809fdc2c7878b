"""GPU benchmark of rates, attention, training steps, repeatability and decoding, in ten minutes.

    python benchmarks/gpu.py
    JAX_PLATFORMS=cpu python benchmarks/gpu.py --smoke  # tiny shapes, to try the script anywhere

Each case runs in a process of its own, so that its peak of memory is its own, and writes its row to
``benchmarks/results/gpu.json`` (``--output``) at once. Cases for which no time is left are named at
the end. Speed is the median of steps that follow each other without a look at their results. MFU
counts attention whole, and ``mfu_causal`` half of it; both are shares of the published bfloat16
rate.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jllama
from jllama.config import LoraConfig
from jllama.devices import peak_bytes, peak_flops, program_bytes
from jllama.functional import ATTENTION, Mask
from jllama.lora import convert_weight
from jllama.parameters import map_by_path, parameter_table, shape_of, training_flops_per_token

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT_TOKENS = 701
Row = dict[str, Any]
ONE_B = {"preset": "llama3.2-1b", "batch": 4, "seq": 4096, "remat": "dots"}
EIGHT_B = {"preset": "llama3.1-8b", "batch": 2, "seq": 8192, "remat": "block", "layers": 8}
FOUR_LAYERS = {"preset": "llama3.2-1b", "batch": 2, "seq": 2048, "remat": "dots", "layers": 4}
ADAPTERS = {"preset": "llama3.1-8b", "batch": 4, "seq": 2048, "remat": "block"}
DECODING = {"preset": "llama3.2-1b", "seq": 1024}
CASES: list[Row] = [
    {"case": "rates"},
    {"case": "train", **ONE_B},
    {"case": "train", **ONE_B, "deterministic": False},
    {"case": "train", **EIGHT_B},
    {"case": "adapters", **ADAPTERS, "base": "nf4"},
    {"case": "equal", **FOUR_LAYERS},
    {"case": "attention", "shape": [4, 32, 8, 4096, 64]},
    {"case": "decode", **DECODING, "batch": 1},
    {"case": "decode", **DECODING, "batch": 64},
    {"case": "prefill", "preset": "llama3.1-8b", "seq": 4096},
    {"case": "train", **ONE_B, "attention": "triton"},
    {"case": "train", **ONE_B, "remat": "none"},
    {"case": "adapters", **ADAPTERS, "base": "bfloat16"},
    {"case": "attention", "shape": [2, 32, 8, 8192, 128]},
    {"case": "decode", **DECODING, "batch": 1, "quantize": "int8"},
]


def model_of(case: Row) -> jllama.LlamaConfig:
    if "preset" not in case:
        return jllama.LlamaConfig(512, 2, 64, 4, 2, 16, 128, max_seq_len=case["seq"])
    model = jllama.preset(case["preset"])
    num_layers = case.get("layers", model.num_layers)
    max_seq_len = max(case["seq"], model.max_seq_len)
    return dataclasses.replace(model, num_layers=num_layers, max_seq_len=max_seq_len)


def config_of(case: Row, **options: Any) -> jllama.TrainConfig:
    loop = jllama.LoopConfig(
        batch_size=case["batch"],
        seq_len=case["seq"],
        remat=case["remat"],
        attention=case.get("attention", "auto"),
        deterministic=case.get("deterministic", "auto"),
    )
    return jllama.TrainConfig(model_of(case), training=loop, **options)


def seconds(function: Callable[..., Any], *arguments: Any, times: int = 10) -> float:
    """Return the seconds of a call: the median of five measurements of ``times`` calls in a row."""
    jax.block_until_ready(function(*arguments))
    measured = []
    for _ in range(5):
        start_s = time.perf_counter()
        for _ in range(times):
            result = function(*arguments)
        jax.block_until_ready(result)
        measured.append((time.perf_counter() - start_s) / times)
    return statistics.median(measured)


def rates(case: Row) -> Row:
    """Measure a large product and a long copy, the best of three each."""
    side = case.get("side", 8192)
    square = jnp.ones((side, side), jnp.bfloat16)
    product_s = min(seconds(jax.jit(jnp.matmul), square, square) for _ in range(3))
    line = jnp.ones(case.get("length", 2**30), jnp.bfloat16)
    copy_s = min(seconds(jax.jit(lambda line: line + 1), line) for _ in range(3))
    return {
        "product_flops_per_s": 2 * side**3 / product_s,
        "copy_bytes_per_s": 2 * line.nbytes / copy_s,
    }


def attention(case: Row) -> Row:
    """Measure every kernel that runs here, on packed rows of eight documents.

    Returns:
        Milliseconds of the forward pass and of both passes by kernel, and the largest relative
        error against the blocked kernel in float32, which is measured on the first row.
    """
    batch, heads, kv_heads, seq, head_dim = case["shape"]
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal((batch, count, seq, head_dim))
        for count in (heads, kv_heads, kv_heads, heads)
    ]
    starts = np.zeros((batch, seq), np.int32)
    for row in starts:
        row[rng.choice(seq, 7, replace=False)] = 1
    segments = jnp.asarray(starts.cumsum(axis=1))

    first_rows = [jnp.asarray(array[:1], jnp.float32) for array in arrays]
    with jax.default_matmul_precision("highest"):
        expected = both_passes("blocked", segments[:1])(*first_rows)
    inputs = [jnp.asarray(array, jnp.bfloat16) for array in arrays]
    mask = Mask(query_segments=segments, key_segments=segments)
    rows = {}
    for name, implementation in ATTENTION.items():
        runs_here = implementation.platform in ("", jax.devices()[0].platform)
        if name == "reference" or not implementation.backward or not runs_here:
            continue
        try:
            function = both_passes(name, segments)
            actual = function(*inputs)
            forward = jax.jit(
                functools.partial(jllama.functional.attention, mask=mask, implementation=name)
            )
            rows[name] = {
                "forward_ms": 1e3 * seconds(forward, *inputs[:3]),
                "both_ms": 1e3 * seconds(function, *inputs),
                "largest_error": max(map(relative_error, actual, expected)),
            }
        except Exception as error:  # that a kernel fails is a result
            rows[name] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return rows


def both_passes(name: str, segments: jax.Array) -> Callable[..., Any]:
    """Return the jitted attention of a kernel with its gradients.

    Its arguments are query, key, value and the gradient of the output.
    """
    mask = Mask(query_segments=segments, key_segments=segments)

    def values_and_gradients(query: Any, key: Any, value: Any, upstream: Any) -> Any:
        call = functools.partial(jllama.functional.attention, mask=mask, implementation=name)
        mixed, back = jax.vjp(call, query, key, value)
        return mixed, *back(upstream)

    return jax.jit(values_and_gradients)


def relative_error(actual: jax.Array, expected: jax.Array) -> float:
    """Return the relative error of the first row, in the Euclidean norm."""
    reference = np.asarray(expected, np.float64)
    difference = np.asarray(actual[:1], np.float64) - reference
    return np.linalg.norm(difference) / np.linalg.norm(reference)


def steps(training: Any, state: Any, case: Row, rows: int = 8) -> Row:
    """Measure a compiled step's speed, and its memory beside the plan."""
    # 1. A batch of packed documents
    rng = np.random.default_rng(0)
    windows = rng.integers(2, model_of(case).vocab_size, (case["batch"], case["seq"] + 1), np.int32)
    windows[:, ::DOCUMENT_TOKENS] = 1
    batch = jax.device_put(jllama.text_batch(windows, bos_id=1), training.batch_sharding)
    # 2. The compiled step
    peak_bytes_at_start = peak_bytes(jax.devices())
    start_s = time.perf_counter()
    step = training.step.lower(state, batch).compile()
    compile_s = time.perf_counter() - start_s
    # 3. Its speed
    state, metrics = jax.block_until_ready(step(state, batch))
    measured = []
    for _ in range(3):
        start_s = time.perf_counter()
        for _ in range(rows):
            state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        measured.append((time.perf_counter() - start_s) / rows)
    step_s = statistics.median(measured)
    tokens_per_s = case["batch"] * case["seq"] / step_s
    # 4. Its share of the published rate
    peak = peak_flops(jax.devices()[0].device_kind) or float("nan")
    shares = training.trainable.shares
    whole = training_flops_per_token(model_of(case), case["seq"], shares)
    products = training_flops_per_token(model_of(case), 0, shares)
    text = step.as_text()
    leaves = jax.tree.leaves(state.params)[:2]
    content = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
    return {
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * whole / peak,
        "mfu_causal": tokens_per_s * (whole + products) / 2 / peak,
        "planned_bytes": sum(program_bytes(step)),
        "peak_bytes": peak_bytes(jax.devices()),
        "peak_bytes_at_start": peak_bytes_at_start,
        "compile_s": compile_s,
        "kernels": [name for name in ("tokamax", "mha_forward", "__cudnn$fmha") if name in text],
        "loss": float(metrics.loss),
        "bits": hashlib.sha256(content).hexdigest(),
    }


def train(case: Row) -> Row:
    training = jllama.compile_training(config_of(case))
    return steps(training, jax.block_until_ready(training.init(jax.random.key(0))), case)


def adapters(case: Row) -> Row:
    """Measure adapters of rank 16.

    Each weight of the base is drawn and converted to its final form before the next one is drawn.
    """
    lora = LoraConfig(rank=case.get("rank", 16), base=case["base"])
    config = config_of(case, init_from="drawn", lora=lora)
    training = jllama.compile_training(config)
    model = config.model
    shapes = jax.eval_shape(lambda: jllama.initial_params(jax.random.key(0), model))
    base = map_by_path(lambda path, _: draw(path, model, lora), shapes)
    return steps(training, jax.block_until_ready(training.init(jax.random.key(0), base)), case)


def draw(path: str, model: jllama.LlamaConfig, lora: LoraConfig) -> Any:
    """Return a random weight in the form of ``lora.base``."""
    shape = shape_of(parameter_table(model)[path], model)
    make = jax.jit(lambda key: 0.02 * jax.random.normal(key, shape, jnp.bfloat16))
    weight = make(jax.random.key(len(path)))
    return jax.block_until_ready(convert_weight(path, weight, model, lora, jnp.bfloat16))


def equal(case: Row) -> Row:
    """Compare the bits after 25 steps of two processes."""
    bits = [run_case({**case, "case": "train"})["bits"] for _ in range(2)]
    return {"equal": bits[0] == bits[1], "bits": [text[:16] for text in bits]}


def decode_params(case: Row) -> tuple[jllama.LlamaConfig, Any]:
    """Return a configuration, and random bfloat16 weights in the layout for decoding."""
    config = model_of(case)

    def make(key: Any) -> Any:
        params = jllama.initial_params(key, config)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    params = jax.jit(make)(jax.random.key(0))
    arrange = jax.jit(lambda params: jllama.decode_layout(params, config, case.get("quantize")))
    return config, arrange(params)


def decode(case: Row) -> Row:
    """Measure a step of the bare loop, behind half of the context."""
    config, params = decode_params(case)
    rows = case["batch"]
    length = case["seq"]
    count = case.get("count", 64)
    lengths = jnp.full(rows, length // 2, jnp.int32)
    cache = jllama.KVCache.zeros(config, rows, length, jnp.bfloat16)._replace(lengths=lengths)
    tokens = jnp.ones((rows, 1), jnp.int32)
    run = jax.jit(functools.partial(decode_steps, config, count))
    step_s = seconds(run, params, cache, tokens, times=2) / count
    return {
        "step_ms": 1e3 * step_s,
        "tokens_per_s": rows / step_s,
        "weights_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
    }


def decode_steps(
    config: jllama.LlamaConfig, count: int, params: Any, cache: Any, tokens: Any
) -> Any:
    """Return the tokens ``[rows, 1]`` after ``count`` greedy steps."""

    def step(carry: Any, _: Any) -> Any:
        cache, tokens = carry
        llama = jllama.build_model(config, params)
        hidden, cache = llama.decode(tokens, cache, jnp.ones(tokens.shape[0], jnp.int32))
        return (cache, jnp.argmax(llama.logits(hidden), axis=-1).astype(jnp.int32)), None

    return jax.lax.scan(step, (cache, tokens), length=count)[0][1]


def prefill(case: Row) -> Row:
    """Measure the time to the first token of one whole prompt."""
    config, params = decode_params(case)
    tokens = jnp.ones((1, case["seq"]), jnp.int32)
    run = jax.jit(functools.partial(first_token, config))
    return {"prefill_ms": 1e3 * seconds(run, params, tokens, times=2)}


def first_token(config: jllama.LlamaConfig, params: Any, tokens: Any) -> Any:
    llama = jllama.build_model(config, params)
    length = tokens.shape[1]
    cache = jllama.KVCache.zeros(config, 1, length, jnp.bfloat16)
    hidden, _ = llama.decode(tokens, cache, jnp.full(1, length, jnp.int32), cache_is_empty=True)
    return jnp.argmax(llama.logits(hidden[:, -1:]))


def tiny(case: Row) -> Row:
    """Return the case in shapes for any machine."""
    small = {name: value for name, value in case.items() if name not in ("preset", "layers")}
    small |= {"seq": 64, "batch": min(case.get("batch", 1), 2), "rank": 2}
    small |= {"side": 128, "length": 1024, "count": 4}
    if case.get("attention") == "triton":
        small["attention"] = "blocked"
    if "shape" in case:
        small["shape"] = [2, 4, 2, 128, 16]
    return small


def run_case(case: Row) -> Row:
    """Measure a case in a process of its own; return the end of its messages if it fails."""
    words = [sys.executable, __file__, "--case", json.dumps(case)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip()[-500:]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--case", type=json.loads, help="one case as JSON; its row is printed")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument(
        "--seconds", type=float, default=560, help="begin no case that might end after this"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(globals()[options.case["case"]](options.case)))
        return

    start_s = time.perf_counter()
    rows = []
    left_out = []
    for case in CASES:
        if time.perf_counter() - start_s > options.seconds - 60:
            left_out.append(case)
            continue
        shown = tiny(case) if options.smoke else case
        rows.append({**shown, "result": run_case(shown)})
        print(json.dumps(rows[-1]), flush=True)
        result = {"rows": rows, "left_out": left_out, "machine": machine()}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(left_out)} cases were left out for lack of time: {left_out}")


def machine() -> dict[str, str]:
    """Describe the device and the software.

    A process that ends asks the device, so that none of the device's memory stays in use.
    """
    code = (
        "import jax; from jllama.devices import describe_driver; device = jax.devices()[0]; "
        "print(device.device_kind, describe_driver(device), sep='|')"
    )
    kind, _, driver = output_of(sys.executable, "-c", code).partition("|")
    packages = [name for name in ("jax", "tokamax", "qwix") if importlib.util.find_spec(name)]
    return {
        "device": kind,
        "driver": driver,
        "commit": output_of("git", "rev-parse", "HEAD"),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def output_of(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
