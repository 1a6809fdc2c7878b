"""Run by test_mesh.py in a process of its own: the same training steps on several meshes, as JSON on stdout."""

import functools
import json

import jax
import numpy as np

from jllama.config import LlamaConfig
from jllama.errors import UsageError
from jllama.model import abstract_params
from jllama.parallel.mesh import BATCH, MeshConfig, make_mesh, state_sharding
from jllama.parameters import map_by_path
from jllama.training.optimizer import OptimizerConfig, make_optimizer
from jllama.training.step import initial_state, train_step

CONFIG = LlamaConfig(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48, max_seq_len=16)
MESHES = {
    "one": MeshConfig(1, 1, 1),
    "data=8": MeshConfig(),
    "data=2 fsdp=2 tensor=2": MeshConfig(2, 2, 2),
    "fsdp=8": MeshConfig(1, 8, 1),
}
STEPS = 3


REFUSED = [MeshConfig(3, 1, 1), MeshConfig(0, 1, 3), MeshConfig(0, 16, 1), MeshConfig(2, 1, 4), MeshConfig(1, 1, 8)]


def one_device():
    axes = dict.fromkeys(("data", "fsdp", "tensor"), jax.sharding.AxisType.Auto)
    return jax.make_mesh((1, 1, 1), tuple(axes), axis_types=tuple(axes.values()), devices=jax.devices()[:1])


def refusal(sizes, state):
    try:
        state_sharding(make_mesh(sizes), CONFIG, state)
    except UsageError as error:
        return str(error)


def leaves(tree):
    found = {}
    map_by_path(found.__setitem__, tree)
    return found


def main():
    # Gradients on the meshes differ by 1e-7 (2e-6 of the largest): the order of the sums. Where one is as small as
    # epsilon, AdamW turns that into learning_rate * 1e-7 / epsilon: with 1e-8 or 1e-5, 3e-5 of the largest parameter.
    settings = OptimizerConfig(learning_rate=3e-2, epsilon=1e-2)
    optimizer = make_optimizer(settings, CONFIG, abstract_params(CONFIG), STEPS)
    start = functools.partial(initial_state, config=CONFIG, optimizer=optimizer)
    abstract = jax.eval_shape(start, jax.random.key(0))
    windows = np.random.default_rng(0).integers(1, 64, (STEPS, 8, 17)).astype(np.int32)
    report, expected = {"refused": [refusal(sizes, abstract) for sizes in REFUSED]}, {}
    for name, sizes in MESHES.items():
        mesh = make_mesh(sizes) if name != "one" else one_device()
        shardings = state_sharding(mesh, CONFIG, abstract)
        state = jax.jit(start, out_shardings=shardings)(jax.random.key(0))
        initial = {path: np.asarray(leaf) for path, leaf in leaves(state.params).items()}
        step = functools.partial(train_step, config=CONFIG, optimizer=optimizer, bos_id=1)
        take_step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        losses = []
        for batch in windows:
            placed = jax.device_put(batch, jax.sharding.NamedSharding(mesh, BATCH))
            assert {shard.data.shape[0] for shard in placed.addressable_shards} == {8 // (mesh.size // sizes.tensor)}
            state, metrics = take_step(state, placed)
            losses.append(float(metrics.loss))
        moments = state.opt_state[1][0]
        params = {path: np.asarray(leaf) for path, leaf in leaves(state.params).items()}
        expected = expected or params
        report[name] = {
            "losses": losses,
            "initial_sum": {path: float(np.sum(np.float64(leaf))) for path, leaf in initial.items()},
            "moved": float(max(np.max(np.abs(params[path] - initial[path])) for path in params)),
            "errors": {p: float(np.max(np.abs(params[p] - e)) / np.max(np.abs(e))) for p, e in expected.items()},
            "shards": {p: leaf.addressable_shards[0].data.shape for p, leaf in leaves(state.params).items()},
            "moment_shards": {p: leaf.addressable_shards[0].data.shape for p, leaf in leaves(moments.mu).items()},
            "devices": len(state.params["embed"].sharding.device_set),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
