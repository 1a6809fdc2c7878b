"""A contestant of ``jllama bench``, jllama itself or a peer: a process that works when it is asked.

    python contestant.py WORK

It prepares, and writes a line of JSON with facts that its figures are compared with. Then it takes
a turn for each line of stdin, and answers with the seconds or with the machine's rates. It imports
only what it measures, because the Python that has llama.cpp may have nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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

# The process that measures a CPU's rates, so that no contestant's memory holds what that needs.
MACHINE = "machine"
PROMPT = "The capital of France is"
# The lengths of the eight prompts that are continued together.
RAGGED_TOKENS = (10, 20, 37, 50, 64, 70, 100, 120)
# The texts that are decoded together, beside one text and a batch.
FEW_TEXTS = 4
# The length of the prompts whose prefill is not measured.
CONTEXT_TOKENS = 32
# On a CPU: a matrix to read, and the side of the matrices to multiply.
BANDWIDTH_SHAPE = (1 << 15, 1 << 12)
SQUARE = 2048
# On a GPU or TPU, where starting a program takes as long as all the work that suits a CPU.
LONG_COPY = 1 << 30
LARGE_SQUARE = 8192
Work = dict[str, Any]
Prompts = Sequence[Sequence[int]]


class Case(NamedTuple):
    """Work to measure: prompts of some ``lengths``, continued together by ``new_tokens`` each."""

    tokens: int  # that are read or written
    lengths: Sequence[int] = (CONTEXT_TOKENS,)
    new_tokens: int = 1
    with_prefill: bool = True
    # Steps of decoding, which the memory's bandwidth limits; other work has the limit of products.
    steps: int = 0


def cases_of(options: BenchOptions) -> dict[str, Case]:
    """Return what is measured, by its title."""
    new = options.new_tokens
    context = [CONTEXT_TOKENS]
    if options.what == "train":
        from jllama.commands.bench import train_config

        training = train_config(options).training
        batch = training.batch_size
        seq_len = training.seq_len
        return {f"training step, {batch} x {seq_len}": Case(batch * seq_len, [seq_len] * batch)}
    length = options.prompt_tokens
    prefill = {f"prefill, {length} tokens": Case(length, [length])}
    if options.what == "prefill":
        return prefill
    if options.what == "decode":
        cases = {}
        for rows in sorted({1, FEW_TEXTS, options.batch_size}):
            title = f"decode, {rows} text{'s' * (rows > 1)}"
            cases[title] = Case(rows * (new - 1), context * rows, new, False, new - 1)
        ragged = f"8 ragged prompts, {new} tokens each"
        cases[ragged] = Case(8 * new, RAGGED_TOKENS, new, True, new)
        return {**cases, **prefill}
    if options.what == "startup":
        return {"start to first character": Case(0)}
    return {"load to first token": Case(0)}


def prepare(work: Work) -> Work:
    """Return what all contestants need to know, after the model was written for peers.

    The model of ``train`` has the weights that jllama begins with.
    """
    from jllama.commands.bench import parse_options, train_config

    options = parse_options(work["argv"])
    cases = cases_of(options)
    device = device_of(options.against)
    llama_python = options.llama_python if "llama.cpp" in options.against else ""
    shared: Work = {
        "hf": f"{work['folder']}/model.hf",
        "gguf": f"{work['folder']}/model.gguf",
        "prompt": PROMPT,
        "cases": {title: case._asdict() for title, case in cases.items()},
        "context": max(max(case.lengths) + case.new_tokens for case in cases.values()),
        "rows": max(len(case.lengths) for case in cases.values()),
        "cells": max(map(count_cells, cases.values())),
        "device": device,
        "facts": machine_facts(work["threads"], device, llama_python),
        "sample": sample_arguments(options),
    }
    config = None
    if options.what == "train":
        config = train_config(options)
        shared["optimizer"] = vars(config.optimizer)
        shared["vocab_size"] = config.model.vocab_size
        shared["batch"] = [config.training.batch_size, config.training.seq_len + 1]
    formats = {"gguf" if name == "llama.cpp" else "hf" for name in options.against}
    # Loading is measured from the checkpoint itself if the peer can read it, and so is llama.cpp
    # where jllama takes the file's weights as they are.
    checkpoint = Path(options.checkpoint)
    is_loading = options.what in ("startup", "load")
    is_gguf = checkpoint.suffix == ".gguf"
    readable = set()
    if options.adapter:
        pass  # no peer merges it
    elif is_loading and is_gguf:
        readable = {"hf", "gguf"}
    elif is_loading and (checkpoint / "config.json").exists():
        readable = {"hf"}
    elif is_gguf and not options.dtype and not options.quantize and keeps_blocks(checkpoint):
        readable = {"gguf"}
    shared |= dict.fromkeys(readable, str(checkpoint))
    if formats - readable:
        import jax

        import jllama

        if config:
            params = jllama.initial_params(jax.random.key(0), config.model)
            model = jllama.LanguageModel(config.model, params)
        else:
            plain = dataclasses.replace(options, dtype="float32", quantize=None)
            model = plain.load_model(needs_tokenizer=False)
        for format in formats - readable:
            is_quantized = options.quantize and format == "gguf"
            jllama.save(model, shared[format], format, "q8_0" if is_quantized else "float32")
    if "llama.cpp" in options.against:
        from jllama.formats.registry import open_checkpoint

        shared["vocab_size"] = open_checkpoint(shared["gguf"]).config.vocab_size
    return shared


def keeps_blocks(checkpoint: Path) -> bool:
    """Return whether jllama multiplies matrices of a GGUF file as they are stored."""
    from jllama.formats.registry import open_checkpoint
    from jllama.kernels.linear import KERNELS

    tensors = open_checkpoint(checkpoint).tensors.values()
    kinds = {getattr(tensor, "quantized", "") for tensor in tensors}
    return bool(importlib.util.find_spec("numba")) and not kinds.isdisjoint(KERNELS)


def count_cells(case: Case) -> int:
    """Count the tokens whose keys and values a case keeps at its end."""
    return sum(case.lengths) + len(case.lengths) * case.new_tokens


def sample_arguments(options: BenchOptions) -> list[str]:
    """Return the arguments with which ``jllama sample`` loads the same model."""
    from jllama.commands.model import ModelOptions

    fields = dataclasses.fields(ModelOptions)
    values = {field.name: getattr(options, field.name) for field in fields}
    mesh = vars(values.pop("mesh"))
    values |= {f"mesh.{name}": size for name, size in mesh.items() if name != "rules"}
    values |= {"prompt": PROMPT, "echo": "false", "temperature": 0, "max_new_tokens": 8}
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def device_of(against: Sequence[str]) -> str:
    """Return where all contestants work.

    It is ``cuda`` if JAX and every peer can use a GPU, otherwise with peers ``cpu``, and without
    peers JAX's own platform.
    """
    import jax

    if not against:
        return jax.default_backend()
    has_torch = importlib.util.find_spec("torch")
    if jax.default_backend() != "gpu" or "llama.cpp" in against or not has_torch:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def machine_facts(threads: int, device: str, llama_python: str) -> dict[str, str]:
    """Describe the machine, the used part of it, and versions of the packages, also llama.cpp's."""
    import jax

    cpus = Path("/proc/cpuinfo")
    text = cpus.read_text() if cpus.exists() else ""
    names = re.findall(r"model name\s*: (.*)", text)
    parts = [*names[:1]] or [platform.processor() or platform.machine()]
    if text:
        parts.append("AVX-512" if "avx512f" in text else "no AVX-512")
    parts.append(f"{threads} threads")
    if jax.default_backend() != "cpu":
        accelerator = jax.devices()[0].device_kind
        if device == "cpu":
            accelerator = f"the CPU, since not all have {accelerator}"
        parts.append(accelerator)
    versions = [f"Python {platform.python_version()}"]
    for name in ("jllama", "jax", "torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    if llama_python:  # its own contestant reports what is wrong with it
        for name in ("llama_cpp_python", "xllamacpp"):
            code = f"import importlib.metadata as m; print('{name}', m.version('{name}'))"
            with contextlib.suppress(OSError):
                done = subprocess.run([llama_python, "-c", code], capture_output=True, text=True)
                versions += done.stdout.splitlines()[-1:]
    return {"machine": ", ".join(parts), "versions": ", ".join(versions)}


# Generation. A loader imports all that its model needs, and returns a function that loads the
# model. The model has ``vocab_size``, ``facts``, and ``generate(prompts, new_tokens)``, which
# continues all prompts together by so many tokens each, greedily and without a stop.


def jllama_loader(work: Work) -> Callable[[], JllamaModel]:
    """Return what loads jllama's model, as the options describe it."""
    import jax

    import jllama.generation.engine
    import jllama.generation.requests  # noqa: F401
    from jllama.commands.bench import parse_options

    options = parse_options(work["argv"])
    jax.devices()  # starts them
    return functools.partial(JllamaModel, work, options)


class JllamaModel:
    """A model of jllama."""

    def __init__(self, work: Work, options: BenchOptions) -> None:
        import jllama

        if options.checkpoint:
            self.model = options.load_model(needs_tokenizer=False)
        else:
            self.model = random_model(options)
        context = work["context"]
        limit = self.model.config.max_seq_len
        if context > limit:
            raise jllama.UsageError(
                f"the benchmark needs {context} tokens of context, and the model "
                f"has {limit}: choose fewer --prompt_tokens or --new_tokens"
            )
        self.vocab_size = self.model.config.vocab_size
        self.facts: Work = {}
        if work["what"] != "load":
            self.facts = generation_facts(self.model, options, work["device"])

    def generate(self, prompts: Prompts, new_tokens: int) -> None:
        import jllama
        from jllama.generation.requests import Request

        greedy = jllama.SamplingParams(temperature=0.0)
        engine = jllama.Engine(self.model, len(prompts))
        for prompt in prompts:
            engine.submit(Request(jllama.Prompt(prompt, greedy, new_tokens)))
        while engine.busy:
            engine.step()


def random_model(options: BenchOptions) -> jllama.LanguageModel:
    """Return a preset's model with random weights: on a CPU in float32, elsewhere in bfloat16."""
    import jax

    import jllama

    config = jllama.preset(options.preset)
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")

    def make(key: Any) -> Any:
        params = jllama.initial_params(key, config)
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    params = jax.jit(make)(jax.random.key(0))
    return jllama.LanguageModel(config, jllama.decode_layout(params, config, options.quantize))


def generation_facts(model: jllama.LanguageModel, options: BenchOptions, device: str) -> Work:
    """Return what each contestant needs at least: FLOPs of a prompt, or bytes of a decoding step.

    Only the last token of a prompt has logits. The model of transformers is in bfloat16 on a GPU,
    elsewhere in float32.
    """
    from jllama.core.parameters import count_parameters
    from jllama.training.metrics import training_flops_per_token

    config = model.config
    params = model.decode_params
    head = config.vocab_size * config.embed_dim
    num_read = count_parameters(config) - (0 if config.tie_embeddings else head)
    transformers_bytes = (2 if device == "cuda" else 4) * num_read
    needed = {}
    for title, case in cases_of(options).items():
        if case.steps:
            rows = len(case.lengths)
            amount = bytes_per_step(model, rows, sum(case.lengths) // rows + case.new_tokens // 2)
            transformers = amount + transformers_bytes - bytes_per_step(model, 0, 0)
        else:
            flops = training_flops_per_token(config, case.tokens) / 3 - 2 * head
            amount = transformers = case.tokens * flops
        needed[title] = {"jllama": amount, "llama.cpp": amount, "transformers": transformers}
    devices = len(params.weights["final_norm"].sharding.device_set)  # of the mesh, if there is one
    return {"needed": needed, "dtype": params.dtype.name, "devices": devices}


def bytes_per_step(model: jllama.LanguageModel, batch: int, context: int) -> int:
    """Return the bytes that a decoding step must read.

    These are every weight once, and the keys and values that the last of ``context`` tokens of a
    row sees. An embedding that is not also the head is left out: ``batch`` rows of it are read.
    """
    import jax

    config = model.config
    params = model.decode_params
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tie_embeddings:
        weights -= sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights["embed"]))
    cached_values = 2 * config.num_kv_heads * config.head_dim * config.num_visible(context)
    return weights + batch * cached_values * params.dtype.itemsize


def transformers_loader(work: Work) -> Callable[[], TransformersModel]:
    """Return what loads the model of transformers."""
    import torch
    from transformers import AutoModelForCausalLM  # noqa: F401

    torch.set_num_threads(work["threads"])
    return functools.partial(TransformersModel, work)


class TransformersModel:
    """A model of transformers, in float32, on a GPU in bfloat16; it pads prompts on the left."""

    def __init__(self, work: Work) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.device = work["device"]
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(**hf_files(work), dtype=dtype)
        self.model = model.to(self.device).eval()
        self.vocab_size = model.config.vocab_size
        self.facts: Work = {}

    def generate(self, prompts: Prompts, new_tokens: int) -> None:
        import torch

        length = max(map(len, prompts))
        rows = [[0] * (length - len(prompt)) + [*prompt] for prompt in prompts]
        seen = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            self.model.generate(
                torch.tensor(rows, device=self.device),
                attention_mask=torch.tensor(seen, device=self.device),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
            ).cpu()


def hf_files(work: Work) -> dict[str, str]:
    """Return the arguments of ``from_pretrained`` for a folder or a GGUF file."""
    folder, name = os.path.split(work["hf"])
    if name.endswith(".gguf"):
        return {"pretrained_model_name_or_path": folder or ".", "gguf_file": name}
    return {"pretrained_model_name_or_path": work["hf"]}


def llama_cpp_loader(work: Work) -> Callable[[], LlamaCppModel | LlamaCppServer]:
    """Return what loads the model of llama.cpp, from the package that is installed."""
    if importlib.util.find_spec("xllamacpp"):
        import xllamacpp  # noqa: F401

        return functools.partial(LlamaCppServer, work)
    import llama_cpp  # noqa: F401
    import numpy  # noqa: F401

    return functools.partial(LlamaCppModel, work)


class LlamaCppServer:
    """A model of llama.cpp in xllamacpp's server, without HTTP."""

    def __init__(self, work: Work) -> None:
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path = work["gguf"]
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = work["threads"]
        # All texts share the cells of one cache, as llama-server has it.
        options.n_parallel = work["rows"]
        options.kv_unified = True
        options.n_ctx = work["cells"]
        options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self.server = xllamacpp.Server(options)
        self.vocab_size = work["vocab_size"]
        self.facts: Work = {}

    def generate(self, prompts: Prompts | str, new_tokens: int, *callback: Any) -> None:
        greedy = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}
        sizes = {"n_predict": new_tokens, "stream": bool(callback)}
        request = {"prompt": prompts, **sizes, **greedy}
        answer = self.server.handle_completions(request, *callback)
        if not callback and "choices" not in answer:
            raise RuntimeError(str(answer))


class LlamaCppModel:
    """A model of llama.cpp with keys and values in float32; NumPy finds the likeliest token."""

    def __init__(self, work: Work) -> None:
        import llama_cpp as cpp

        defaults = cpp.llama_model_default_params()
        model = cpp.llama_model_load_from_file(work["gguf"].encode(), defaults)
        options = cpp.llama_context_default_params()
        options.n_seq_max = work["rows"]
        options.kv_unified = True  # as llama-server has it
        options.n_ctx = options.n_batch = work["cells"]
        options.n_threads = options.n_threads_batch = work["threads"]
        options.type_k = options.type_v = 0  # float32
        self.vocab_size = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(model))
        self.context = cpp.llama_init_from_model(model, options)
        self.batch = cpp.llama_batch_init(work["cells"], 0, 1)
        self.facts: Work = {}

    def feed(self, tokens: Prompts, starts: Sequence[int]) -> Prompts:
        """Process each row's tokens, which begin at its start, and return its next token."""
        import llama_cpp as cpp
        import numpy as np

        batch = self.batch
        index = 0
        ends = []
        for row, (row_tokens, start) in enumerate(zip(tokens, starts, strict=True)):
            for position, token in enumerate(row_tokens, start):
                batch.token[index] = token
                batch.pos[index] = position
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = row
                batch.logits[index] = position == start + len(row_tokens) - 1
                index += 1
            ends.append(index - 1)
        batch.n_tokens = index
        code = cpp.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code}")
        logits = [cpp.llama_get_logits_ith(self.context, end) for end in ends]
        return [[int(np.ctypeslib.as_array(row, (self.vocab_size,)).argmax())] for row in logits]

    def generate(self, prompts: Prompts, new_tokens: int) -> None:
        import llama_cpp as cpp

        cpp.llama_memory_clear(cpp.llama_get_memory(self.context), True)
        tokens = prompts
        starts = [0] * len(prompts)
        for _ in range(new_tokens):
            following = self.feed(tokens, starts)
            starts = [start + len(row) for start, row in zip(starts, tokens, strict=True)]
            tokens = following


class Generation:
    """The continuation of the prompts of a case; to measure ``load``, each turn loads the model."""

    def __init__(self, work: Work) -> None:
        self.load = LOADERS[work["name"]](work)
        self.loaded = None if work["what"] == "load" else self.load()
        self.facts = self.loaded.facts if self.loaded else {}

    def take(self, case: Work) -> Work:
        """Return the seconds of a turn, without those of the prefill if the case leaves it out."""
        seconds = self.generate_s(case, case["new_tokens"])
        if not case["with_prefill"]:
            seconds -= self.generate_s(case, 1)
        return {"seconds": seconds}

    def generate_s(self, case: Work, new_tokens: int) -> float:
        start_s = time.perf_counter()
        model = self.loaded or self.load()
        model.generate(random_prompts(case["lengths"], model.vocab_size), new_tokens)
        return time.perf_counter() - start_s


def random_prompts(lengths: Sequence[int], vocab_size: int) -> Prompts:
    """Return prompts of random tokens, which are the same each time."""
    draws = random.Random(0)
    return [draws.choices(range(vocab_size), k=length) for length in lengths]


# Training. A trainer has ``facts``, and ``step(tokens)``, which returns the loss.


class JllamaTrainer:
    """The step of ``compile_training``; it is compiled first, so that its memory is known."""

    def __init__(self, work: Work) -> None:
        import jax
        import numpy as np

        import jllama
        from jllama.commands.bench import parse_options, train_config
        from jllama.system.devices import peak_flops
        from jllama.system.memory import program_bytes
        from jllama.training.metrics import training_flops_per_token

        config = train_config(parse_options(work["argv"]))
        training = jllama.compile_training(config)
        params = None
        if os.path.exists(work["hf"]):  # the weights that the peers begin with
            params = jllama.load(work["hf"], layout="training").params
        self.state = training.init(jax.random.key(0), params)
        self.sharding = training.batch_sharding
        tokens = self.placed(np.zeros(work["batch"], np.int32))
        self.compiled = training.step.lower(self.state, tokens).compile()

        seq_len = config.training.seq_len
        num_tokens = config.training.batch_size * seq_len
        flops = num_tokens * training_flops_per_token(config.model, seq_len)
        products = num_tokens * training_flops_per_token(config.model, 0)
        needed = dict.fromkeys(TRAINERS, flops)
        self.facts: Work = {
            "needed": dict.fromkeys(work["cases"], needed),
            "dtype": "float32" if jax.default_backend() == "cpu" else "bfloat16",
            "devices": training.mesh.size,
            "planned_bytes": sum(program_bytes(self.compiled)),
        }
        published = peak_flops(jax.devices()[0].device_kind)
        if published:
            self.facts["published_flops_per_s"] = training.mesh.size * published
            self.facts["flops"] = flops
            self.facts["causal_flops"] = (flops + products) / 2

    def placed(self, tokens: Any) -> Any:
        import jax

        import jllama

        return jax.device_put(jllama.text_batch(tokens, bos_id=-1), self.sharding)

    def step(self, tokens: Any) -> float:
        import jax

        results = self.compiled(self.state, self.placed(tokens))
        self.state, metrics = jax.block_until_ready(results)
        return float(metrics.loss)


class TransformersTrainer:
    """The loss of transformers and torch's fused AdamW; for ``torch-compile`` it is compiled.

    On a GPU products are in bfloat16, as jllama's.
    """

    def __init__(self, work: Work) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(work["threads"])
        self.device = work["device"]
        self.facts: Work = {}
        model: Any = AutoModelForCausalLM.from_pretrained(**hf_files(work), dtype=torch.float32)
        self.model = model.to(self.device).train()
        self.forward = torch.compile(model) if work["name"] == "torch-compile" else model
        settings = work["optimizer"]
        self.clip_norm = settings["clip_norm"]
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        norms = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": norms, "weight_decay": 0.0}],
            lr=settings["learning_rate"],
            betas=(settings["beta1"], settings["beta2"]),
            eps=settings["epsilon"],
            weight_decay=settings["weight_decay"],
            fused=True,
        )

    def step(self, tokens: Any) -> float:
        import torch

        ids = torch.from_numpy(tokens).long().to(self.device)
        targets = ids[:, 1:].contiguous()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.forward(
                input_ids=ids[:, :-1], labels=targets, shift_labels=targets, use_cache=False
            ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Training:
    """Steps of training; each turn has other rows, which are the same for all contestants."""

    def __init__(self, work: Work) -> None:
        import numpy as np

        self.work = work
        self.trainer = TRAINERS[work["name"]](work)
        self.facts = self.trainer.facts
        self.draws = np.random.default_rng(0)

    def take(self, _: Work) -> Work:
        """Return the loss of a step, and its seconds."""
        tokens = self.draws.integers(0, self.work["vocab_size"], self.work["batch"], "int32")
        start_s = time.perf_counter()
        loss = self.trainer.step(tokens)
        seconds = time.perf_counter() - start_s
        return {"loss": loss, "seconds": seconds}


def peak_bytes_of(work: Work) -> int | None:
    """Return the peak of this contestant's memory so far.

    On a CPU it is the process's, with what it has read of mapped files; None where the system does
    not tell it.
    """
    status = Path("/proc/self/status")
    if work["device"] == "cpu":
        peaks = re.findall(r"VmHWM:\s*(\d+) kB", status.read_text() if status.exists() else "")
        return 1024 * int(peaks[0]) if peaks else None
    if work["name"] == "jllama":
        import jax

        from jllama.system.memory import peak_bytes

        return peak_bytes(jax.devices())
    import torch

    return torch.cuda.max_memory_allocated()


def machine_rates(dtype: str, devices: int) -> dict[str, float]:
    """Measure the rates of these devices: FLOPs of a square product, and bytes moved, a second.

    A CPU reads a matrix to multiply it with a vector; a GPU or TPU reads and writes a long row.
    """
    import jax
    import jax.numpy as jnp

    on_cpu = jax.default_backend() == "cpu"
    side = SQUARE if on_cpu else LARGE_SQUARE
    square = jnp.ones((side, side), dtype)
    product = jax.jit(jnp.matmul)
    flops_per_s = 2 * side**3 / best_s(lambda: product(square, square))
    if on_cpu:
        matrix = jnp.ones(BANDWIDTH_SHAPE, dtype)
        bytes_per_s = matrix.nbytes / best_s(lambda: product(matrix, matrix[0]))
    else:
        row = jnp.ones(LONG_COPY, dtype)
        increment = jax.jit(lambda row: row + 1)
        bytes_per_s = 2 * row.nbytes / best_s(lambda: increment(row))
    return {"flops_per_s": devices * flops_per_s, "bytes_per_s": devices * bytes_per_s}


def best_s(function: Callable[[], Any]) -> float:
    """Return the shortest of seven times of a call."""
    return min(timeit.repeat(lambda: function().block_until_ready(), number=1, repeat=7))


# Start-up


def stream_jllama(work: Work) -> None:
    """Run ``jllama sample``."""
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


def stream_llama_cpp(work: Work) -> None:
    """Load and write, as a script with xllamacpp or llama-cpp-python would."""
    if importlib.util.find_spec("xllamacpp"):

        def show(piece: Any) -> bool:
            print(piece["choices"][0]["text"], end="", flush=True)
            return False

        server = LlamaCppServer({**work, "rows": 1, "cells": 512})
        return server.generate(work["prompt"], 8, show)
    import llama_cpp

    model = llama_cpp.Llama(work["gguf"], n_ctx=512, n_threads=work["threads"], verbose=False)
    for piece in model(work["prompt"], max_tokens=8, temperature=0.0, stream=True):
        print(piece["choices"][0]["text"], end="", flush=True)


LOADERS: dict[str, Any] = {
    "jllama": jllama_loader,
    "transformers": transformers_loader,
    "llama.cpp": llama_cpp_loader,
}
TRAINERS = {
    "jllama": JllamaTrainer,
    "transformers": TransformersTrainer,
    "torch-compile": TransformersTrainer,
}
STREAMERS = {
    "jllama": stream_jllama,
    "transformers": stream_transformers,
    "llama.cpp": stream_llama_cpp,
}


def main(work: Work) -> None:
    if work["what"] == "startup" and work["name"] in STREAMERS:
        return STREAMERS[work["name"]](work)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what packages print is no answer
    if work["name"] == "prepare":
        return print(json.dumps(prepare(work)), file=answers)
    contestant: Any = None
    if work["name"] != MACHINE:
        contestant = Training(work) if work["what"] == "train" else Generation(work)
    print(json.dumps(contestant.facts if contestant else {}), file=answers)
    for line in sys.stdin:
        turn = json.loads(line)
        if "dtype" in turn:
            answer = machine_rates(**turn)
        else:
            # On a GPU the rates are measured in the same process, whose peak says no more.
            tells_memory = work["what"] == "train" or work["device"] == "cpu"
            peak_bytes = peak_bytes_of(work) if tells_memory else None
            answer = contestant.take(turn) | {"peak_bytes": peak_bytes}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
