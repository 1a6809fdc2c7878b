"""GPU benchmark of rates, attention, training, decoding, the server and transformers beside them.

    python benchmarks/gpu.py
    JAX_PLATFORMS=cpu python benchmarks/gpu.py --smoke  # tiny shapes, to try the script anywhere

Each case runs in a process of its own, so that its peak of memory is its own, and writes its row to
``benchmarks/results/gpu.json`` (``--output``) at once. All take about 13 minutes; cases for which
no time is left (``--seconds``) are named at the end, and ``--only`` takes some kinds of cases.
Speed is the median of steps that follow each other without a look at their results. MFU counts
attention whole, and ``mfu_causal`` half of it; both are shares of the published bfloat16 rate.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import http.client
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jllama
from jllama.core.parameters import map_by_path, parameter_table, shape_of
from jllama.formats.huggingface import config_to_huggingface
from jllama.functional import ATTENTION, Mask
from jllama.models.config import LoraConfig
from jllama.models.lora import convert_weight
from jllama.system.devices import peak_flops
from jllama.system.memory import peak_bytes, program_bytes
from jllama.tokenizers.base import BytesTokenizer
from jllama.training.metrics import training_flops_per_token

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
    {"case": "serve", "preset": "llama3.2-1b", "seq": 2048, "slots": 64},
    {"case": "killed", "embed": 512, "steps": 300},
    {"case": "transformers_train", **ONE_B},
    {"case": "transformers_decode", **DECODING, "batch": 1},
    {"case": "transformers_decode", **DECODING, "batch": 64},
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


def longest_ms(function: Callable[[], Any], calls: int = 1) -> dict[str, float]:
    """Return the milliseconds of a call's 20 longest kernels by name, and their sum and number.

    ``calls`` is how many steps the function makes. On a CPU there is no such trace.
    """
    if jax.devices()[0].platform != "gpu":
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(function())
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    # 1. The threads of events that are streams of the device
    devices = set()
    streams = set()
    for event in events:
        name = event.get("args", {}).get("name", "")
        if event.get("name") == "process_name" and "GPU" in name:
            devices.add(event["pid"])
        elif event.get("name") == "thread_name" and "Stream" in name:
            streams.add((event["pid"], event["tid"]))
    # 2. Their kernels
    total_ms: collections.Counter[str] = collections.Counter()
    launches = 0
    for event in events:
        is_kernel = event.get("ph") == "X" and (event["pid"], event["tid"]) in streams
        if is_kernel and event["pid"] in devices:
            total_ms[event["name"][:80]] += event["dur"] / 1e3 / calls
            launches += 1
    sums = {"all": sum(total_ms.values()), "launches": launches / calls}
    return sums | dict(total_ms.most_common(20))


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
        "longest_ms": longest_ms(lambda: step(state, batch)),
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
        "longest_ms": longest_ms(lambda: run(params, cache, tokens), count),
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
    prefill_s = seconds(run, params, tokens, times=2)
    return {"prefill_ms": 1e3 * prefill_s, "longest_ms": longest_ms(lambda: run(params, tokens))}


def first_token(config: jllama.LlamaConfig, params: Any, tokens: Any) -> Any:
    llama = jllama.build_model(config, params)
    length = tokens.shape[1]
    cache = jllama.KVCache.zeros(config, 1, length, jnp.bfloat16)
    hidden, _ = llama.decode(tokens, cache, jnp.full(1, length, jnp.int32), cache_is_empty=True)
    return jnp.argmax(llama.logits(hidden[:, -1:]))


def serve(case: Row) -> Row:
    """Measure ``jllama serve`` over HTTP with tokens of bytes: tokens a second by clients.

    Twelve answers, with their log-probabilities, are compared with those given alone.
    """
    with tempfile.TemporaryDirectory() as name:
        # 1. A random model, saved by a process that leaves the device alone
        folder = str(Path(name) / "model")
        words = json.dumps({**case, "case": "save_random", "folder": folder})
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, __file__, "--case", words], check=True, env=environment)
        # 2. A server
        start_s = time.perf_counter()
        port = 8123
        command = ["serve", folder, "--port", str(port), "--slots", str(case["slots"])]
        command += ["--context", str(case["seq"])]
        with (
            open(Path(name) / "log", "w+") as log,
            subprocess.Popen(
                [sys.executable, "-m", "jllama", *command], stdout=log, stderr=log
            ) as server,
        ):
            ask = functools.partial(ask_server, port, Path(folder).name)
            ready = False
            while not ready:
                if server.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"the server did not start: {log.read()[-1000:]}")
                time.sleep(0.2)
                with contextlib.suppress(OSError):
                    ready = ask(0)[0] > 0
            ready_s = time.perf_counter() - start_s
            # 3. Answers alone, then in company
            try:
                alone = [ask(seed) for seed in range(12)]
                row: Row = {"ready_s": ready_s}
                for clients in (1, 16, case["slots"]):
                    start_s = time.perf_counter()
                    with ThreadPoolExecutor(clients) as threads:
                        answers = list(threads.map(ask, range(max(12, 3 * clients))))
                    tokens = sum(count for count, _ in answers)
                    row[f"tokens_per_s_{clients}"] = tokens / (time.perf_counter() - start_s)
                    row[f"equal_to_alone_{clients}"] = answers[:12] == alone
            finally:
                server.send_signal(signal.SIGTERM)
            row["exit_code"] = server.wait(60)
    return row


def save_random(case: Row) -> Row:
    """Save a random model with tokens of bytes in Hugging Face's format."""
    config = dataclasses.replace(model_of(case), vocab_size=BytesTokenizer.vocab_size)
    params = jllama.initial_params(jax.random.key(0), config)
    model = jllama.LanguageModel(config, params, BytesTokenizer())
    jllama.save(model, case["folder"], "hf", "bfloat16")
    return {}


def ask_server(port: int, model: str, seed: int) -> tuple[int, str]:
    """Return the tokens of an answer, and all that it says of them."""
    rng = random.Random(seed)
    prompt = "".join(rng.choices("abcdefgh ", k=rng.randint(20, 600)))
    body: Row = {"model": model, "prompt": prompt, "max_tokens": 128, "seed": seed, "logprobs": 1}
    body["temperature"] = rng.choice([0, 0.8])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = json.loads(connection.getresponse().read())
    connection.close()
    if "choices" not in answer:
        return 0, json.dumps(answer)
    return answer["usage"]["completion_tokens"], json.dumps(answer["choices"])


def killed(case: Row) -> Row:
    """Compare the weights of a whole run with those of one that is killed and resumed.

    Its text is the source of Python's standard library.
    """
    steps = case["steps"]
    with tempfile.TemporaryDirectory() as name:
        options = {
            "model.embed_dim": case["embed"],
            "model.num_heads": case["embed"] // 64,
            "model.mlp_dim": 3 * case["embed"],
            "training.steps": steps,
            "training.eval_every": steps // 3,
            "training.log_every": 1,
            "training.sample_tokens": 0,
        }
        command = [sys.executable, str(ROOT / "train.py"), "--config"]
        command += [str(ROOT / "configs" / "quickstart.yaml"), "--resume", "auto"]
        for key, value in options.items():
            command += [f"--{key}", str(value)]
        whole, resumed = Path(name) / "whole", Path(name) / "resumed"
        subprocess.run([*command, "--run_dir", str(whole)], check=True, capture_output=True)
        log = resumed / "metrics.jsonl"
        with subprocess.Popen(
            [*command, "--run_dir", str(resumed)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            while process.poll() is None:
                if log.exists() and len(log.read_text().splitlines()) > steps // 2:
                    process.kill()
                time.sleep(0.01)
        logged_steps = len(log.read_text().splitlines())
        done = subprocess.run(
            [*command, "--run_dir", str(resumed)], check=True, capture_output=True
        )
        bits = []
        for run in (whole, resumed):
            leaves = jax.tree.leaves(jllama.load(run, step=steps, layout="training").params)
            content = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
            bits.append(hashlib.sha256(content).hexdigest()[:16])
    said = [line for line in done.stderr.decode().splitlines() if "resum" in line]
    return {
        "equal": bits[0] == bits[1],
        "bits": bits,
        "killed_by": process.returncode,
        "lines_logged_then": logged_steps,
        "said": said[:1],
    }


def transformers_model(case: Row) -> Any:
    """Return transformers' Llama of a case's shape, on the device."""
    import torch
    import transformers

    config = transformers.LlamaConfig(**config_to_huggingface(model_of(case), "float32"))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return transformers.LlamaForCausalLM(config)


def transformers_train(case: Row) -> Row:
    """Measure a compiled step of transformers: float32 weights, bfloat16 products, fused AdamW."""
    import torch

    torch.set_float32_matmul_precision("high")
    model = transformers_model(case).float().train()
    forward = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, weight_decay=0.1)
    shape = (case["batch"], case["seq"] + 1)
    tokens = torch.randint(2, model.config.vocab_size, shape, device=model.device)

    def step() -> Any:
        with torch.autocast(model.device.type, torch.bfloat16):
            targets = tokens[:, 1:].contiguous()
            loss = forward(
                input_ids=tokens[:, :-1], labels=targets, shift_labels=targets, use_cache=False
            ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(3):
        step().item()
    start_s = time.perf_counter()
    for _ in range(8):
        loss = step()
    loss.item()
    step_s = (time.perf_counter() - start_s) / 8
    tokens_per_s = case["batch"] * case["seq"] / step_s
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = peak_flops(device) or float("nan")
    whole = training_flops_per_token(model_of(case), case["seq"])
    row = {"step_s": step_s, "tokens_per_s": tokens_per_s, "mfu": tokens_per_s * whole / peak}
    if torch.cuda.is_available():
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def transformers_decode(case: Row) -> Row:
    """Measure a step of transformers' greedy decoding with its static cache, compiled."""
    import torch

    torch.set_default_dtype(torch.bfloat16)
    model = transformers_model(case).eval()
    count = case.get("count", 128)
    prompts = torch.randint(2, 256, (case["batch"], 32), device=model.device)

    def generate_s(new_tokens: int) -> float:
        start_s = time.perf_counter()
        with torch.inference_mode():
            tokens = model.generate(
                prompts,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                cache_implementation="static",
            )
        tokens.cpu()
        return time.perf_counter() - start_s

    for _ in range(2):
        generate_s(count + 1)
    differences = [generate_s(count + 1) - generate_s(1) for _ in range(3)]
    step_s = statistics.median(differences) / count
    return {"step_ms": 1e3 * step_s, "tokens_per_s": case["batch"] / step_s}


def tiny(case: Row) -> Row:
    """Return the case in shapes for any machine."""
    small = {name: value for name, value in case.items() if name not in ("preset", "layers")}
    small |= {"seq": 64, "batch": min(case.get("batch", 1), 2), "rank": 2}
    small |= {"side": 128, "length": 1024, "count": 4, "embed": 128, "steps": 30, "slots": 4}
    if case["case"] == "serve":
        small["seq"] = 1024
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
    parser.add_argument("--only", nargs="*", help="the kinds of cases, such as serve and killed")
    parser.add_argument(
        "--seconds", type=float, default=900, help="begin no case that might end after this"
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
        if options.only and case["case"] not in options.only:
            continue
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
        "import jax; from jllama.system.machine import describe_driver; device = jax.devices()[0]; "
        "print(device.device_kind, describe_driver(device), sep='|')"
    )
    kind, _, driver = output_of(sys.executable, "-c", code).partition("|")
    names = ("jax", "tokamax", "qwix", "torch", "transformers")
    packages = [name for name in names if importlib.util.find_spec(name)]
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
