"""Whom ``jllama bench`` measures, jllama itself and its peers: a process each, which works whenever it is told to.

    python contestant.py WORK

It makes ready, says so in a line of JSON with what the figures are to be compared with, and then takes a turn for each
line of stdin and answers with its seconds. Only what is measured is imported: the Python that has llama.cpp may have
nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jllama
    from jllama.commands.bench import BenchOptions

PROMPT = "The capital of France is"
RAGGED_TOKENS = (
    10,
    20,
    37,
    50,
    64,
    70,
    100,
    120,
)  # lengths of the eight prompts that are continued together
CONTEXT_TOKENS = 32  # length of the prompts whose prefill is left out
BANDWIDTH_SHAPE, SQUARE = (1 << 15, 1 << 12), 2048  # of a CPU
LONG_COPY, LARGE_SQUARE = (
    1 << 30,
    8192,
)  # of a GPU or TPU, whose own start takes as long as what a CPU does
Work = dict[str, Any]
Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, int], Any]
"""Continues all prompts together by so many tokens each, greedily and without a stop."""
Load = Callable[[], tuple[Generate, int, Work]]
"""Loads a model, all it needs having been imported; gives the size of its vocabulary, too, and its facts."""
Step = Callable[[Any], float]
"""Takes a step of training on a batch of tokens, and gives its loss."""


class Case(NamedTuple):
    """Work: prompts of some ``lengths``, continued together by ``new_tokens`` each."""

    tokens: int  # that are read or written
    lengths: Sequence[int] = (CONTEXT_TOKENS,)
    new_tokens: int = 1
    with_prefill: bool = True
    steps: int = (
        0  # of decoding, which the memory's bandwidth limits, other work the rate of products
    )


def cases_of(options: BenchOptions) -> dict[str, Case]:
    """What is measured, by its title."""
    new, rows, prompt, context = (
        options.new_tokens,
        options.batch_size,
        options.prompt_tokens,
        [CONTEXT_TOKENS],
    )
    if options.what == "train":
        from jllama.commands.bench import train_config

        training = train_config(options).training
        batch, seq_len = training.batch_size, training.seq_len
        return {f"training step, {batch} x {seq_len}": Case(batch * seq_len, [seq_len] * batch)}
    if options.what == "prefill":
        return {f"prefill, {prompt} tokens": Case(prompt, [prompt])}
    if options.what == "decode":
        return {
            "decode, 1 text": Case(new - 1, context, new, False, new - 1),
            f"decode, {rows} texts": Case(rows * (new - 1), context * rows, new, False, new - 1),
            f"8 ragged prompts, {new} tokens each": Case(8 * new, RAGGED_TOKENS, new, True, new),
        }
    return {
        "start to first character" if options.what == "startup" else "load to first token": Case(0)
    }


def prepare(work: Work) -> Work:
    """What all contestants are told; for peers the model, or the one that training begins with, is written first."""
    from jllama.commands.bench import parse_options, train_config
    from jllama.commands.model import ModelOptions

    options = parse_options(work["argv"])
    cases, own = cases_of(options), Path(options.checkpoint)
    told = {name: f"{work['folder']}/model.{name}" for name in ("hf", "gguf")} | {"prompt": PROMPT}
    told |= {"cases": {title: case._asdict() for title, case in cases.items()}}
    told |= {"context": max(max(case.lengths) + case.new_tokens for case in cases.values())}
    told |= {"rows": max(len(case.lengths) for case in cases.values())}
    told |= {"device": device_of(options.against)}
    llama_python = options.llama_python if "llama.cpp" in options.against else ""
    told |= {"facts": machine_facts(work["threads"], told["device"], llama_python)}
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(ModelOptions)}
    given |= {
        f"mesh.{name}": size for name, size in vars(given.pop("mesh")).items() if name != "rules"
    }
    given |= {"prompt": PROMPT, "echo": "false", "temperature": 0, "max_new_tokens": 8}
    told |= {"sample": [f"--{name}={value}" for name, value in given.items() if value is not None]}
    config = train_config(options) if options.what == "train" else None
    if config:
        told |= {"optimizer": vars(config.optimizer), "vocab_size": config.model.vocab_size}
        told |= {"batch": [config.training.batch_size, config.training.seq_len + 1]}
    formats = {"gguf" if name == "llama.cpp" else "hf" for name in options.against}
    if (
        options.what in ("startup", "load") and not options.adapter
    ):  # from the same file, who can read it
        readable = (
            ["hf", "gguf"]
            if own.suffix == ".gguf"
            else ["hf"]
            if (own / "config.json").exists()
            else []
        )
        told, formats = told | dict.fromkeys(readable, str(own)), formats - {*readable}
    if formats:
        import jax

        import jllama

        if config:
            model = jllama.LanguageModel(
                config.model, jllama.initial_params(jax.random.key(0), config.model)
            )
        else:
            model = dataclasses.replace(options, dtype="float32", quantize=None).load_model(
                needs_tokenizer=False
            )
        for format in formats:
            jllama.save(
                model,
                told[format],
                format,
                "q8_0" if options.quantize and format == "gguf" else "float32",
            )
    return told


def device_of(against: Sequence[str]) -> str:
    """Where all work: ``cuda`` if JAX and every peer have a GPU, else with peers ``cpu``, alone JAX's own platform."""
    import jax

    if not against:
        return jax.default_backend()
    if (
        jax.default_backend() != "gpu"
        or "llama.cpp" in against
        or not importlib.util.find_spec("torch")
    ):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def machine_facts(threads: int, device: str, llama_python: str) -> dict[str, str]:
    """The processor or accelerator, how much of it is taken, and the packages that this Python and llama.cpp's have."""
    import jax

    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = re.findall(r"model name\s*: (.*)", told)[:1] or [
        platform.processor() or platform.machine()
    ]
    found += ["AVX-512" if "avx512f" in told else "no AVX-512"] if told else []
    versions = [f"Python {platform.python_version()}"]
    for name in ("jllama", "jax", "torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    if llama_python:  # what is wrong with it, its own contestant says
        asked = [
            llama_python,
            "-c",
            "import llama_cpp; print('llama-cpp-python', llama_cpp.__version__)",
        ]
        with contextlib.suppress(OSError):
            versions += subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()[
                -1:
            ]
    found += [f"{threads} threads"]
    if jax.default_backend() != "cpu":
        accelerator = jax.devices()[0].device_kind
        found += (
            [f"the CPU, since not all have {accelerator}"] if device == "cpu" else [accelerator]
        )
    return {"machine": ", ".join(found), "versions": ", ".join(versions)}


def jllama_loader(work: Work) -> Load:
    """The model of jllama, as the options say it."""
    import jax

    import jllama
    from jllama.commands.bench import parse_options
    from jllama.errors import UsageError
    from jllama.generation.engine import Engine
    from jllama.generation.requests import Request

    options, greedy, context = (
        parse_options(work["argv"]),
        jllama.SamplingParams(temperature=0.0),
        work["context"],
    )
    jax.devices()  # starts them

    def load() -> tuple[Generate, int, Work]:
        model = (
            options.load_model(needs_tokenizer=False)
            if options.checkpoint
            else random_model(options)
        )
        if context > (most := model.config.max_seq_len):
            raise UsageError(
                f"the benchmark needs {context} tokens of context, and the model has {most}"
            )

        def generate(prompts: Prompts, new_tokens: int) -> None:
            engine = Engine(model, len(prompts))
            for prompt in prompts:
                engine.submit(Request(jllama.Prompt(prompt, greedy, new_tokens)))
            while engine.busy:
                engine.step()

        return (
            generate,
            model.config.vocab_size,
            {} if work["what"] == "load" else generation_facts(model, options, work["device"]),
        )

    return load


def random_model(options: BenchOptions) -> jllama.LanguageModel:
    """A preset's model of random weights, by default in float32 on a CPU and in bfloat16 elsewhere."""
    import jax

    import jllama

    config = jllama.preset(options.preset)
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    make = jax.jit(
        lambda key: jax.tree.map(
            lambda leaf: leaf.astype(dtype), jllama.initial_params(key, config)
        )
    )
    params = jllama.decode_layout(make(jax.random.key(0)), config, options.quantize)
    return jllama.LanguageModel(config, params)


def generation_facts(model: jllama.LanguageModel, options: BenchOptions, device: str) -> Work:
    """What each contestant needs at least: operations for a prompt, whose last token alone has logits; bytes a step.

    transformers' model is in bfloat16 on a GPU, else in float32.
    """
    from jllama.parameters import count_parameters, training_flops_per_token

    config, params, needed = model.config, model.decode_params, {}
    head = config.vocab_size * config.embed_dim
    read = count_parameters(config) - (0 if config.tie_embeddings else head)
    theirs_bytes = (2 if device == "cuda" else 4) * read
    for title, case in cases_of(options).items():
        rows, more = len(case.lengths), 0
        amount = case.tokens * (training_flops_per_token(config, case.tokens) / 3 - 2 * head)
        if case.steps:
            amount = bytes_per_step(model, rows, sum(case.lengths) // rows + case.new_tokens // 2)
            more = theirs_bytes - bytes_per_step(model, 0, 0)
        needed[title] = {"jllama": amount, "llama.cpp": amount, "transformers": amount + more}
    devices = len(params.weights["final_norm"].sharding.device_set)  # of the mesh, if there is one
    return {"needed": needed, "dtype": params.dtype.name, "devices": devices}


def bytes_per_step(model: jllama.LanguageModel, batch: int, context: int) -> int:
    """Bytes that a decoding step must read: every weight once, and the keys and values of ``context`` tokens a row; of
    an embedding that is not also the head only ``batch`` rows, which count for nothing.
    """
    import jax

    config, params = model.config, model.decode_params
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tie_embeddings:
        weights -= sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights["embed"]))
    cached_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim * context
    return weights + batch * cached_values * params.dtype.itemsize


def jllama_trainer(work: Work) -> tuple[Step, Work]:
    """The step of ``compile_training``, compiled before its first turn, so that its memory is known."""
    import jax
    import numpy as np

    import jllama
    from jllama.commands.bench import parse_options, train_config
    from jllama.devices import peak_flops, program_bytes
    from jllama.parameters import training_flops_per_token

    config = train_config(parse_options(work["argv"]))
    training = jllama.compile_training(config)
    # From the weights that the peers begin with, too, if there are any.
    params = (
        jllama.load(work["hf"], layout="training").params if os.path.exists(work["hf"]) else None
    )
    state = training.init(jax.random.key(0), params)

    def placed(tokens: Any) -> Any:
        return jax.device_put(jllama.text_batch(tokens, bos_id=-1), training.batch_sharding)

    compiled = training.step.lower(state, placed(np.zeros(work["batch"], np.int32))).compile()

    def step(tokens: Any) -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(compiled(state, placed(tokens)))
        return float(metrics.loss)

    batch_size, seq_len = config.training.batch_size, config.training.seq_len
    flops = batch_size * seq_len * training_flops_per_token(config.model, seq_len)
    products = batch_size * seq_len * training_flops_per_token(config.model, 0)
    published = peak_flops(jax.devices()[0].device_kind)
    needed = {
        title: dict.fromkeys(("jllama", "transformers", "torch-compile"), flops)
        for title in work["cases"]
    }
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    facts = {"needed": needed, "dtype": dtype, "devices": training.mesh.size}
    if published:
        facts |= {"published_flops_per_s": training.mesh.size * published}
        facts |= {"flops": flops, "causal_flops": (flops + products) / 2}
    return step, facts | {"planned_bytes": sum(program_bytes(compiled))}


def machine_rates(dtype: str = "float32", devices: int = 1, repeats: int = 7) -> dict[str, float]:
    """What so many of these devices can do in a second: operations of a square product, and bytes that are moved.

    The best of some repeats each. A CPU reads a matrix to multiply it with a vector; a GPU or TPU reads and writes a
    long row.
    """
    import jax
    import jax.numpy as jnp

    def best_s(function: Callable[..., Any], *arrays: Any) -> float:
        return min(
            timeit.repeat(lambda: function(*arrays).block_until_ready(), number=1, repeat=repeats)
        )

    on_cpu = jax.default_backend() == "cpu"
    side = SQUARE if on_cpu else LARGE_SQUARE
    square = jnp.ones((side, side), dtype)
    flops_per_s = 2 * side**3 / best_s(jax.jit(jnp.matmul), square, square)
    if on_cpu:
        matrix = jnp.ones(BANDWIDTH_SHAPE, dtype)
        bytes_per_s = matrix.nbytes / best_s(jax.jit(jnp.matmul), matrix, matrix[0])
    else:
        row = jnp.ones(LONG_COPY, dtype)
        bytes_per_s = 2 * row.nbytes / best_s(jax.jit(lambda row: row + 1), row)
    return {"flops_per_s": devices * flops_per_s, "bytes_per_s": devices * bytes_per_s}


def hf_files(work: Work) -> dict[str, str]:
    """What ``from_pretrained`` is given: a folder, or a GGUF file."""
    folder, name = os.path.split(work["hf"])
    if name.endswith(".gguf"):
        return {"pretrained_model_name_or_path": folder or ".", "gguf_file": name}
    return {"pretrained_model_name_or_path": work["hf"]}


def transformers_loader(work: Work) -> Load:
    """The model of transformers in float32, on a GPU in bfloat16; prompts are padded on the left."""
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(work["threads"])

    def load() -> tuple[Generate, int, Work]:
        dtype = torch.bfloat16 if work["device"] == "cuda" else torch.float32
        model = (
            LlamaForCausalLM.from_pretrained(**hf_files(work), dtype=dtype)
            .to(work["device"])
            .eval()
        )

        def generate(prompts: Prompts, new_tokens: int) -> None:
            padding = [[0] * (max(map(len, prompts)) - len(prompt)) for prompt in prompts]
            rows = [[*zeros, *prompt] for zeros, prompt in zip(padding, prompts, strict=True)]
            seen = [
                zeros + [1] * len(prompt) for zeros, prompt in zip(padding, prompts, strict=True)
            ]
            ids, mask = (
                torch.tensor(rows, device=work["device"]),
                torch.tensor(seen, device=work["device"]),
            )
            length: Any = {
                "max_new_tokens": new_tokens,
                "min_new_tokens": new_tokens,
                "pad_token_id": 0,
            }
            with torch.inference_mode():
                model.generate(ids, attention_mask=mask, do_sample=False, **length).cpu()

        return generate, model.config.vocab_size, {}

    return load


def transformers_trainer(work: Work) -> tuple[Step, Work]:
    """The loss of transformers and torch's fused AdamW; with ``torch-compile`` the model is compiled.

    On a GPU products are in bfloat16, as jllama's.
    """
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(work["threads"])
    device, rates = work["device"], work["optimizer"]
    model = (
        LlamaForCausalLM.from_pretrained(**hf_files(work), dtype=torch.float32).to(device).train()
    )
    forward = torch.compile(model) if work["name"] == "torch-compile" else model
    matrices = {"params": [each for each in model.parameters() if each.ndim > 1]}
    norms = {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0}
    adamw: Any = {
        "lr": rates["learning_rate"],
        "betas": (rates["beta1"], rates["beta2"]),
        "eps": rates["epsilon"],
    }
    optimizer = torch.optim.AdamW(
        [matrices, norms], **adamw, weight_decay=rates["weight_decay"], fused=True
    )

    def step(tokens: Any) -> float:
        ids = torch.from_numpy(tokens).long().to(device)
        targets = ids[:, 1:].contiguous()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = forward(
                input_ids=ids[:, :-1], labels=targets, shift_labels=targets, use_cache=False
            ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), rates["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, {}


def stream_jllama(work: Work) -> None:
    """What ``jllama sample`` does."""
    from jllama.commands import cli

    sys.exit(cli.run("sample", work["sample"]))


def stream_transformers(work: Work) -> None:
    """Load and write, as a script with transformers would."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    tokenizer = AutoTokenizer.from_pretrained(**hf_files(work))
    dtype = "bfloat16" if work["device"] == "cuda" else "float32"
    model = AutoModelForCausalLM.from_pretrained(**hf_files(work), dtype=dtype).to(work["device"])
    prompt = tokenizer(work["prompt"], return_tensors="pt").to(work["device"])
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    model.generate(**prompt, max_new_tokens=8, do_sample=False, streamer=streamer)


def llama_cpp_loader(work: Work) -> Load:
    """The model of llama.cpp, with keys and values in float32; NumPy finds the likeliest token."""
    import llama_cpp as cpp
    import numpy as np

    rows, most_tokens = work["rows"], work["rows"] * -(-work["context"] // 256) * 256

    def load() -> tuple[Generate, int, Work]:
        model = cpp.llama_model_load_from_file(
            work["gguf"].encode(), cpp.llama_model_default_params()
        )
        options = cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.n_batch = most_tokens, rows, most_tokens
        options.n_threads = options.n_threads_batch = work["threads"]
        options.type_k = options.type_v = 0  # float32
        vocab_size = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(model))
        context, batch = (
            cpp.llama_init_from_model(model, options),
            cpp.llama_batch_init(most_tokens, 0, 1),
        )

        def feed(fed: Prompts, starts: Sequence[int]) -> Prompts:
            """Take in each row's tokens, from its start on, and give its next one."""
            batch.n_tokens, ends = 0, []
            for row, (tokens, start) in enumerate(zip(fed, starts, strict=True)):
                for position, token in enumerate(tokens, start):
                    at = batch.n_tokens
                    batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = (
                        token,
                        position,
                        1,
                        row,
                    )
                    batch.logits[at] = position == start + len(tokens) - 1
                    batch.n_tokens += 1
                ends.append(batch.n_tokens - 1)
            if code := cpp.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode gave {code}")
            logits = [
                np.ctypeslib.as_array(cpp.llama_get_logits_ith(context, at), (vocab_size,))
                for at in ends
            ]
            return [[int(row.argmax())] for row in logits]

        def generate(prompts: Prompts, new_tokens: int) -> None:
            cpp.llama_memory_clear(cpp.llama_get_memory(context), True)
            fed, starts = prompts, [0] * len(prompts)
            for _ in range(new_tokens):
                following = feed(fed, starts)
                starts = [start + len(tokens) for start, tokens in zip(starts, fed, strict=True)]
                fed = following

        return generate, vocab_size, {}

    return load


def stream_llama_cpp(work: Work) -> None:
    """Load and write, as a script with llama-cpp-python would."""
    import llama_cpp

    model = llama_cpp.Llama(work["gguf"], n_ctx=512, n_threads=work["threads"], verbose=False)
    for piece in model(work["prompt"], max_tokens=8, temperature=0.0, stream=True):
        print(piece["choices"][0]["text"], end="", flush=True)


LOADERS = {
    "jllama": jllama_loader,
    "transformers": transformers_loader,
    "llama.cpp": llama_cpp_loader,
}
TRAINERS = {
    "jllama": jllama_trainer,
    "transformers": transformers_trainer,
    "torch-compile": transformers_trainer,
}
STREAMERS = {
    "jllama": stream_jllama,
    "transformers": stream_transformers,
    "llama.cpp": stream_llama_cpp,
}


def random_prompts(lengths: Sequence[int], vocab_size: int) -> Prompts:
    """Prompts of random tokens, the same each time."""
    draws = random.Random(0)
    return [draws.choices(range(vocab_size), k=length) for length in lengths]


def training(work: Work) -> tuple[Callable[[Work], dict[str, float]], Work]:
    """What takes a step on other rows in each turn, the same for all, and the facts."""
    import numpy as np

    step, facts = TRAINERS[work["name"]](work)
    draws = np.random.default_rng(0)

    def take(_: Work) -> dict[str, float]:
        tokens = draws.integers(0, work["vocab_size"], work["batch"], np.int32)
        start_s = time.perf_counter()
        return {
            "loss": step(tokens),
            "seconds": time.perf_counter() - start_s,
            "peak_bytes": peak_bytes_of(work),
        }

    return take, facts


def peak_bytes_of(work: Work) -> int | None:
    """The most that this contestant has held of its device so far; None on CPUs."""
    if work["name"] == "jllama":
        import jax

        from jllama.devices import peak_bytes

        return peak_bytes(jax.devices())
    if work["device"] != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated()


def generation(work: Work) -> tuple[Callable[[Work], dict[str, float]], Work]:
    """What continues the prompts of a case, and the facts; to measure ``load``, it loads the model in its turn."""
    load = LOADERS[work["name"]](work)
    loaded = None if work["what"] == "load" else load()

    def take(case: Work) -> dict[str, float]:
        def generate_s(new_tokens: int) -> float:
            start_s = time.perf_counter()
            generate, vocab_size, _ = loaded or load()
            generate(random_prompts(case["lengths"], vocab_size), new_tokens)
            return time.perf_counter() - start_s

        return {
            "seconds": generate_s(case["new_tokens"])
            - (0.0 if case["with_prefill"] else generate_s(1))
        }

    return take, loaded[2] if loaded else {}


def main(work: Work) -> None:
    if work["what"] == "startup" and work["name"] in STREAMERS:
        return STREAMERS[work["name"]](work)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what packages print is no answer
    if work["name"] == "prepare":
        return print(json.dumps(prepare(work)), file=answers)
    take, facts = (training if work["what"] == "train" else generation)(work)
    print(json.dumps(facts), file=answers)
    for line in sys.stdin:
        turn = json.loads(line)
        answer = take(turn) if turn else machine_rates(facts["dtype"], facts["devices"])
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
