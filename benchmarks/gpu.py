"""What a GPU makes of jllama: rates, attention, training steps, equal runs, decoding; one call under ten minutes.

    python benchmarks/gpu.py
    JAX_PLATFORMS=cpu python benchmarks/gpu.py --smoke  # tiny shapes, to try the script on any machine

Each case runs in a process of its own, so that its peak of memory is its own, and writes its row to
``benchmarks/results/gpu.json`` (``--output``) as soon as it has it. Cases for which no time is left are named at the
end. Speed is the median of steps that follow each other without a look at their results. MFU counts attention whole,
and ``mfu_causal`` half of it; both are shares of the published bfloat16 rate.
"""

import argparse
import dataclasses
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
from jllama.data.batches import text_batch
from jllama.decode_params import decode_layout
from jllama.devices import peak_bytes, peak_flops, program_bytes
from jllama.functional import ATTENTION, Mask
from jllama.lora import held
from jllama.model import KVCache, build_model, initial_params
from jllama.parameters import map_by_path, parameter_table, shape_of, training_flops_per_token

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT_TOKENS = 701
ONE_B = {"preset": "llama3.2-1b", "batch": 4, "seq": 4096, "remat": "dots"}
EIGHT_B = {"preset": "llama3.1-8b", "batch": 2, "seq": 8192, "remat": "block", "layers": 8}
ADAPTERS = {"preset": "llama3.1-8b", "batch": 4, "seq": 2048, "remat": "block"}
CASES: list[dict[str, Any]] = [
    {"case": "rates"},
    {"case": "train", **ONE_B},
    {"case": "train", **ONE_B, "deterministic": False},
    {"case": "train", **EIGHT_B},
    {"case": "adapters", **ADAPTERS, "base": "nf4"},
    {
        "case": "equal",
        "preset": "llama3.2-1b",
        "layers": 4,
        "batch": 2,
        "seq": 2048,
        "remat": "dots",
    },
    {"case": "attention", "shape": [4, 32, 8, 4096, 64]},
    {"case": "decode", "preset": "llama3.2-1b", "batch": 1, "seq": 1024},
    {"case": "decode", "preset": "llama3.2-1b", "batch": 64, "seq": 1024},
    {"case": "prefill", "preset": "llama3.1-8b", "seq": 4096},
    {"case": "train", **ONE_B, "attention": "triton"},
    {"case": "train", **ONE_B, "remat": "none"},
    {"case": "adapters", **ADAPTERS, "base": "bfloat16"},
    {"case": "attention", "shape": [2, 32, 8, 8192, 128]},
    {"case": "decode", "preset": "llama3.2-1b", "batch": 1, "seq": 1024, "quantize": "int8"},
]


def model_of(case: dict[str, Any]) -> jllama.LlamaConfig:
    if "preset" not in case:
        return jllama.LlamaConfig(512, 2, 64, 4, 2, 16, 128, max_seq_len=case["seq"])
    model = jllama.preset(case["preset"])
    return dataclasses.replace(
        model,
        num_layers=case.get("layers", model.num_layers),
        max_seq_len=max(case["seq"], model.max_seq_len),
    )


def config_of(case: dict[str, Any], **options: Any) -> jllama.TrainConfig:
    loop = jllama.LoopConfig(
        batch_size=case["batch"],
        seq_len=case["seq"],
        remat=case["remat"],
        attention=case.get("attention", "auto"),
        deterministic=case.get("deterministic", "auto"),
    )
    return jllama.TrainConfig(model_of(case), training=loop, **options)


def seconds(function: Callable[..., Any], *arguments: Any, times: int = 10) -> float:
    """The median of five of a call's time, each of several calls in a row."""
    jax.block_until_ready(function(*arguments))
    taken = []
    for _ in range(5):
        start_s = time.perf_counter()
        for _ in range(times):
            result = function(*arguments)
        jax.block_until_ready(result)
        taken.append((time.perf_counter() - start_s) / times)
    return statistics.median(taken)


def rates(case: dict[str, Any]) -> dict[str, Any]:
    """A large product and a long copy, the best of several."""
    side, length = case.get("side", 8192), case.get("length", 2**30)
    square = jnp.ones((side, side), jnp.bfloat16)
    product_s = min(seconds(jax.jit(jnp.matmul), square, square) for _ in range(3))
    line = jnp.ones(length, jnp.bfloat16)
    copy_s = min(seconds(jax.jit(lambda line: line + 1), line) for _ in range(3))
    return {
        "product_flops_per_s": 2 * side**3 / product_s,
        "copy_bytes_per_s": 2 * line.nbytes / copy_s,
    }


def attention(case: dict[str, Any]) -> dict[str, Any]:
    """Packed rows of eight documents: milliseconds, and errors against float32 in blocks, of each that serves them."""
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
    mask = Mask(query_segments=segments, key_segments=segments)

    def both(name: str, dtype: Any, rows: int) -> tuple[Callable[..., Any], list[Any]]:
        own = mask._replace(query_segments=segments[:rows], key_segments=segments[:rows])

        def values_and_gradients(query: Any, key: Any, value: Any, upstream: Any) -> Any:
            call = lambda *heads: jllama.functional.attention(*heads, own, name)  # noqa: E731
            mixed, back = jax.vjp(call, query, key, value)
            return mixed, *back(upstream)

        return jax.jit(values_and_gradients), [jnp.asarray(each[:rows], dtype) for each in arrays]

    with jax.default_matmul_precision("highest"):
        function, inputs = both("blocked", jnp.float32, 1)
        expected = [np.asarray(each, np.float64) for each in function(*inputs)]
    rows = {}
    platform_name = jax.devices()[0].platform
    for name, implementation in ATTENTION.items():
        if (
            name in ("reference", "xla")
            or not implementation.backward
            or implementation.platform not in ("", platform_name)
        ):
            continue
        try:
            function, inputs = both(name, jnp.bfloat16, batch)
            found = [np.asarray(each[:1], np.float64) for each in function(*inputs)]
            errors = [
                np.linalg.norm(a - b) / np.linalg.norm(b)
                for a, b in zip(found, expected, strict=True)
            ]
            forward = jax.jit(
                lambda query, key, value, name=name: jllama.functional.attention(
                    query, key, value, mask, name
                )
            )
            rows[name] = {
                "forward_ms": 1e3 * seconds(forward, *inputs[:3]),
                "both_ms": 1e3 * seconds(function, *inputs),
                "largest_error": max(errors),
            }
        except Exception as error:  # what one cannot do is a result
            rows[name] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return rows


def steps(training: Any, state: Any, case: dict[str, Any], rows: int = 8) -> dict[str, Any]:
    """A compiled step's speed, and its memory beside the plan."""
    rng = np.random.default_rng(0)
    windows = rng.integers(2, model_of(case).vocab_size, (case["batch"], case["seq"] + 1), np.int32)
    windows[:, ::DOCUMENT_TOKENS] = 1
    batch = jax.device_put(text_batch(windows, bos_id=1), training.batch_sharding)
    starting = peak_bytes(jax.devices())
    start_s = time.perf_counter()
    step = training.step.lower(state, batch).compile()
    compile_s = time.perf_counter() - start_s
    state, metrics = jax.block_until_ready(step(state, batch))
    taken = []
    for _ in range(3):
        start_s = time.perf_counter()
        for _ in range(rows):
            state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        taken.append((time.perf_counter() - start_s) / rows)
    step_s = statistics.median(taken)
    tokens_per_s = case["batch"] * case["seq"] / step_s
    shares, peak = (
        training.trainable.shares,
        peak_flops(jax.devices()[0].device_kind) or float("nan"),
    )
    whole = training_flops_per_token(model_of(case), case["seq"], shares)
    products = training_flops_per_token(model_of(case), 0, shares)
    text = step.as_text()
    return {
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * whole / peak,
        "mfu_causal": tokens_per_s * (whole + products) / 2 / peak,
        "planned_bytes": sum(program_bytes(step)),
        "peak_bytes": peak_bytes(jax.devices()),
        "peak_bytes_at_start": starting,
        "compile_s": compile_s,
        "kernels": [name for name in ("tokamax", "mha_forward", "__cudnn$fmha") if name in text],
        "loss": float(metrics.loss),
        "bits": hashlib.sha256(
            b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params)[:2])
        ).hexdigest(),
    }


def train(case: dict[str, Any]) -> dict[str, Any]:
    training = jllama.compile_training(config_of(case))
    return steps(training, jax.block_until_ready(training.init(jax.random.key(0))), case)


def adapters(case: dict[str, Any]) -> dict[str, Any]:
    """Adapters of rank 16; each weight of the base is drawn, and held in its final form before the next one is."""
    config = config_of(
        case, init_from="drawn", lora=LoraConfig(rank=case.get("rank", 16), base=case["base"])
    )
    training = jllama.compile_training(config)

    def drawn(path: str, _: Any) -> Any:
        shape = shape_of(parameter_table(config.model)[path], config.model)
        make = jax.jit(lambda key: 0.02 * jax.random.normal(key, shape, jnp.bfloat16))
        return jax.block_until_ready(
            held(path, make(jax.random.key(len(path))), config.model, config.lora, jnp.bfloat16)
        )

    base = map_by_path(
        drawn, jax.eval_shape(lambda: initial_params(jax.random.key(0), config.model))
    )
    return steps(training, jax.block_until_ready(training.init(jax.random.key(0), base)), case)


def equal(case: dict[str, Any]) -> dict[str, Any]:
    """The bits after 25 steps, of two processes."""
    words = [sys.executable, __file__, "--case", json.dumps({**case, "case": "train"})]
    found = [
        json.loads(
            subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[
                -1
            ]
        )
        for _ in "ab"
    ]
    return {
        "equal": found[0]["bits"] == found[1]["bits"],
        "bits": [each["bits"][:16] for each in found],
    }


def decode_params(case: dict[str, Any]) -> Any:
    config = model_of(case)
    draw = jax.jit(
        lambda key: jax.tree.map(
            lambda leaf: leaf.astype(jnp.bfloat16), initial_params(key, config)
        )
    )
    return config, jax.jit(lambda params: decode_layout(params, config, case.get("quantize")))(
        draw(jax.random.key(0))
    )


def decode(case: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a step of the bare loop, behind half of the context."""
    config, params = decode_params(case)
    rows, length, count = case["batch"], case["seq"], case.get("count", 64)
    cache = KVCache.zeros(config, rows, length, jnp.bfloat16)._replace(
        lengths=jnp.full(rows, length // 2, jnp.int32)
    )

    def some_steps(params: Any, cache: Any, tokens: Any) -> Any:
        def one(carry: Any, _: Any) -> Any:
            cache, tokens = carry
            llama = build_model(config, params)
            hidden, cache = llama.decode(tokens, cache, jnp.ones(rows, jnp.int32))
            return (cache, jnp.argmax(llama.logits(hidden), axis=-1).astype(jnp.int32)), None

        return jax.lax.scan(one, (cache, tokens), length=count)[0][1]

    step_s = (
        seconds(jax.jit(some_steps), params, cache, jnp.ones((rows, 1), jnp.int32), times=2) / count
    )
    return {
        "step_ms": 1e3 * step_s,
        "tokens_per_s": rows / step_s,
        "weights_bytes": sum(x.nbytes for x in jax.tree.leaves(params)),
    }


def prefill(case: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds to the first token of one whole prompt."""
    config, params = decode_params(case)
    tokens = jnp.ones((1, case["seq"]), jnp.int32)

    def first_token(params: Any, tokens: Any) -> Any:
        llama, cache = (
            build_model(config, params),
            KVCache.zeros(config, 1, case["seq"], jnp.bfloat16),
        )
        hidden, _ = llama.decode(tokens, cache, jnp.full(1, case["seq"], jnp.int32), begins=True)
        return jnp.argmax(llama.logits(hidden[:, -1:]))

    return {"prefill_ms": 1e3 * seconds(jax.jit(first_token), params, tokens, times=2)}


def tiny(case: dict[str, Any]) -> dict[str, Any]:
    """The case in shapes for any machine."""
    small = {
        "seq": 64,
        "batch": min(case.get("batch", 1), 2),
        "side": 128,
        "length": 1024,
        "count": 4,
        "rank": 2,
    }
    kept = {name: value for name, value in case.items() if name not in ("preset", "layers")}
    if case.get("attention") == "triton":
        kept["attention"] = "blocked"
    return {**kept, **small, **({"shape": [2, 4, 2, 128, 16]} if "shape" in case else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--case", type=json.loads, help="one case as JSON, whose row is printed")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument(
        "--seconds", type=float, default=560, help="begin no case that might end after this"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(globals()[options.case["case"]](options.case)))
        return

    start_s, rows, left = time.perf_counter(), [], []
    for case in CASES:
        if time.perf_counter() - start_s > options.seconds - 60:
            left.append(case)
            continue
        own = tiny(case) if options.smoke else case
        done = subprocess.run(
            [sys.executable, __file__, "--case", json.dumps(own)], capture_output=True, text=True
        )
        failed = {"error": done.stderr.strip()[-500:]}
        rows.append(
            {
                **own,
                "result": failed if done.returncode else json.loads(done.stdout.splitlines()[-1]),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        result = {"rows": rows, "left_out": left, "machine": machine()}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(left)} cases were left out for want of time: {left}")


def machine() -> dict[str, str]:
    """The device and what ran on it, asked in a process that ends, so that it holds none of the device's memory."""
    ask = "import jax; from jllama.devices import describe_driver as driver; device = jax.devices()[0]; "
    words = [sys.executable, "-c", f"{ask}print(device.device_kind, driver(device), sep='|')"]
    said = subprocess.run(words, capture_output=True, text=True).stdout
    kind, _, driver = said.strip().partition("|")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    packages = [name for name in ("jax", "tokamax", "qwix") if importlib.util.find_spec(name)]
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "device": kind,
        "driver": driver,
        "commit": commit,
        "python": platform.python_version(),
        **versions,
    }


if __name__ == "__main__":
    main()
