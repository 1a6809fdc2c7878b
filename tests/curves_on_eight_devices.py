"""Run by test_meshes.py in a process of its own: drawn configurations on every mesh of eight
devices and on one device, their curves of loss and samples, and mistakes in the exchanges, as JSON
on stdout.
"""

import itertools
import json
import math
import re
import tempfile
from collections import Counter
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jllama
from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.data.batches import text_batch
from jllama.generation import steps
from jllama.generation.engine import Engine
from jllama.generation.requests import Answer, Request
from jllama.parallel.config import MeshConfig
from jllama.parallel.sharding import make_mesh, state_sharding
from jllama.training.compiling import compile_training
from jllama.training.config import LoopConfig, OptimizerConfig, TrainConfig
from jllama.training.plan import check_batch_divides, decide

STEPS, BOS, DRAWN = 13, 1, 5  # the last step has the batch of the first, of three
MESHES = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(sizes) == 8]
"""Sizes of data, fsdp, tensor and sequence."""
SAMPLED = [(1, 1, 8, 1), (1, 2, 4, 1), (2, 2, 2, 1)]


def drawn(rng):
    """A training run of some small Llama."""
    heads = int(rng.choice([4, 8]))
    model = LlamaConfig(
        vocab_size=int(rng.choice([56, 60, 62, 63, 64])),
        num_layers=2,
        embed_dim=int(rng.choice([20, 24, 32])),
        num_heads=heads,
        num_kv_heads=heads // int(rng.choice([1, 2, 4])),
        head_dim=int(rng.choice([4, 6])),
        mlp_dim=int(rng.choice([40, 44, 48])),
        max_seq_len=64,
        tie_embeddings=bool(rng.integers(2)),
    )
    options = LoopConfig(
        batch_size=16,
        seq_len=16,
        steps=STEPS,
        accumulation=int(rng.choice([1, 2])),
        attention=str(rng.choice(["reference", "blocked"])),
        remat=str(rng.choice(["none", "dots", "block"])),
    )
    return TrainConfig(
        model,
        training=options,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_fraction=0.0, epsilon=1e-4),
    )


def is_legal(config, mesh):
    try:
        state_sharding(mesh, config.model, {})
        check_batch_divides(decide(config, mesh))
    except UsageError:
        return False
    return True


def train(config, mesh, start=None):
    """The state before (``start``, or a fresh one) and behind 13 steps on packed documents, and
    what they said: each loss; the first gradient's norm, since AdamW would not mind one twice too
    large; the first loss by ``evaluate``.
    """
    training = compile_training(
        config, mesh, compiler_options={"xla_backend_optimization_level": 0}
    )
    start = start or training.init(jax.random.key(0))
    state = jax.device_put(jax.tree.map(jnp.copy, start), training.shardings)
    rng = np.random.default_rng(0)
    batches = rng.integers(BOS + 1, config.model.vocab_size, (3, 16, 17)).astype(np.int32)
    batches[rng.random(batches.shape) < 0.15] = BOS
    batches = [text_batch(windows, BOS) for windows in batches]
    # One more program for some.
    evaluates, steps = mesh.shape["sequence"] > 1 < mesh.shape["tensor"], []
    nats, count, _ = training.evaluate(state.params, batches[0]) if evaluates else (0, 0, {})
    for step in range(STEPS):
        state, metrics = training.step(state, batches[step % 3])
        steps.append(metrics)
    losses = [float(metrics.loss) for metrics in steps]
    evaluated = float(nats / count) if evaluates else losses[0]
    return start, state, [*losses, float(steps[0].grad_norm), evaluated]


def relative_error(curve, expected):
    return float(np.max(np.abs(np.subtract(curve, expected)) / np.abs(expected)))


def mistakes():
    """A mesh, and what ``jax.lax`` does where its exchanges are wrong."""
    index, psum = jax.lax.axis_index, jax.lax.psum

    def at_first(name):
        return lambda axis: index(axis) * (axis != name)

    def psum_without_sequence(array, names):
        return psum(array, [name for name in names if name != "sequence"])

    rows, heads = (1, 1, 2, 4), (1, 1, 8, 1)
    first_rows, first_heads = (
        mock.patch("jax.lax.axis_index", at_first(name)) for name in ("sequence", "tensor")
    )
    return {
        "all tokens at the start of the row": (rows, first_rows),
        "the first key-value head for all": (heads, first_heads),
        "sums without sequence": (rows, mock.patch("jax.lax.psum", psum_without_sequence)),
    }


def answers_of(engine, rows):
    """The tokens of requests when all are done."""
    found = {}
    while engine.busy:
        events = [event for event in engine.step() if isinstance(event[1], Answer)]
        found.update((row, event.completion.ids) for row, event in events)
    return [found[row] for row in rows]


def num_programs():
    programs = steps.prefill_chunk, steps.join, steps.decode_block
    return sum(program._cache_size() for program in programs)


def sample(path, mesh):
    """The tokens drawn for eight prompts; how a cache is split, how much of it is ever gathered,
    what compiled anew.
    """
    model = jllama.load(path, mesh=mesh)
    prompts = []
    for number, length in enumerate([5, 9, 1, 20] * 2):
        drawing = jllama.SamplingParams(temperature=0.8, seed=number)
        prompts.append(jllama.Prompt([2 + number] * length, drawing, 20))
    requests, engine = [*map(Request, prompts)], Engine(model, len(prompts))
    rows = [*map(engine.submit, requests)]
    engine.step()
    compiled_before = num_programs()
    rows += map(engine.submit, requests[:3])  # which join later
    ids = answers_of(engine, rows)
    compiled_again = num_programs() - compiled_before
    engine.together_tokens = 64  # as on accelerators: short prompts side by side
    together = answers_of(engine, [*map(engine.submit, requests)])
    batch, staging = engine.batch, engine._prompt_cache
    cache = batch.cache
    shape = cache.keys[0].shape
    shares = {array.addressable_shards[0].data.shape for array in (*cache.keys, *cache.values)}
    num_steps = np.ones(8, np.int32)
    flags = np.int32(1), np.bool_(False), 0
    joins = (
        batch,
        engine.arrays_of([engine.make_row(requests[0])], staging),
        np.int32(0),
        np.int32(0),
    )
    decode = steps.decode_block.lower(model.decode_params, model.config, batch, num_steps, *flags)
    lowered = decode, steps.join.lower(*joins)
    texts = [program.compile().as_text() for program in lowered]
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather", "".join(texts))
    sizes = [math.prod(map(int, sizes.split(","))) for sizes in gathered]
    return {
        "ids": ids[:8],
        "joined_later": ids[8:],
        "together": together,
        "split": [
            [whole // part for whole, part in zip(shape, share, strict=True)] for share in shares
        ],
        "gathered": max(sizes, default=0) / math.prod(shape),
        "compiled_again": compiled_again,
    }


def main():
    # With this seed one mesh gives two heads to a device, and one key-value head to two devices.
    rng, curves, ones, used = np.random.default_rng(15), [], {}, Counter()
    configs = [drawn(rng) for _ in range(DRAWN)]
    one_device = make_mesh(MeshConfig(1), jax.devices()[:1])
    for sizes in MESHES:
        mesh = make_mesh(MeshConfig(*sizes))
        number = min((n for n in range(DRAWN) if is_legal(configs[n], mesh)), key=lambda n: used[n])
        used[number] += 1
        if number not in ones:
            ones[number] = train(configs[number], one_device)
        start, _, expected = ones[number]
        _, _, curve = train(configs[number], mesh, start)
        ends = {"first": curve[0], "last": curve[STEPS - 1]}
        error = relative_error(curve, expected)
        curves.append({"mesh": sizes, "config": number, "error": error, **ends})

    number = next(curve["config"] for curve in curves if curve["mesh"] == SAMPLED[0])
    (start, trained, expected), mistaken = ones[number], {}
    for what, (sizes, mistake) in mistakes().items():
        with mistake:
            _, _, curve = train(configs[number], make_mesh(MeshConfig(*sizes)), start)
        mistaken[what] = relative_error(curve, expected)

    with tempfile.TemporaryDirectory() as folder:
        jllama.save(
            jllama.LanguageModel(configs[number].model, trained.params), f"{folder}/model", "orbax"
        )
        meshes = [None, *(make_mesh(MeshConfig(*sizes)) for sizes in SAMPLED)]
        samples = [sample(f"{folder}/model", mesh) for mesh in meshes]
    print(json.dumps({"curves": curves, "mistakes": mistaken, "sampled": samples}))


if __name__ == "__main__":
    main()
