"""Take the same training step on one device and on a mesh of eight, and compare the losses.

    python examples/mesh.py                              # eight simulated devices on the CPU
    python examples/mesh.py --fsdp 2 --tensor 2          # and 2 times data parallelism

`fsdp` splits parameters, moments and the batch, and gathers a layer where it is used. `tensor`
splits heads, feed-forward width and vocabulary (docs/train.md, docs/distributed.md). On a machine
with eight GPUs or TPUs, add --platform "" to use them.
"""

import argparse

import jax
import numpy as np

import jllama

# Settings.
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--platform", default="cpu", help="empty: the devices that JAX finds")
parser.add_argument("--devices", type=int, default=8, help="how many the CPU simulates")
parser.add_argument("--fsdp", type=int, default=4)
parser.add_argument("--tensor", type=int, default=2)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--seq_len", type=int, default=64)
options = parser.parse_args()

# The number of devices must be set before JAX is first used.
if options.platform == "cpu":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.devices)
devices = jax.devices()

# The same model, data and options for both meshes.
config = jllama.TrainConfig(
    jllama.LlamaConfig(
        512, num_layers=2, embed_dim=128, num_heads=8, num_kv_heads=4, max_seq_len=options.seq_len
    ),
    optimizer=jllama.OptimizerConfig(learning_rate=3e-3, warmup_steps=1),
    training=jllama.LoopConfig(
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        steps=options.steps,
        dtype="float32",
    ),
)
random = np.random.default_rng(0)
windows = random.integers(2, 512, (options.batch_size, options.seq_len + 1))
rows = jllama.text_batch(windows, bos_id=1)


def train(mesh):
    """Take all steps on a mesh; return the state and the loss of each step."""
    training = jllama.compile_training(config, mesh)
    state = training.init(jax.random.key(0))
    batch = jax.device_put(rows, training.batch_sharding)
    losses = []
    for _ in range(options.steps):
        state, metrics = training.step(state, batch)
        losses.append(float(metrics.loss))
    return state, losses


one_device = jllama.make_mesh(jllama.MeshConfig(), devices[:1])
mesh = jllama.make_mesh(
    jllama.MeshConfig(data=-1, fsdp=options.fsdp, tensor=options.tensor), devices
)
print("mesh:", ", ".join(f"{name} {size}" for name, size in mesh.shape.items()))
_, expected = train(one_device)
state, losses = train(mesh)

# How parameters are split: the axes of the mesh, and the shape of the part on one device.
print(f"\n{'parameter':<20}{'shape':<20}{'one device has':<20}split by")
for path, array in jax.tree_util.tree_leaves_with_path(state.params):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    part = array.addressable_shards[0].data.shape
    print(f"{name:<20}{array.shape!s:<20}{part!s:<20}{array.sharding.spec}")

# The losses are those of one device, but for the order of sums.
print(f"\n{'step':<8}{'one device':<16}{f'{mesh.size} devices':<16}difference")
for step, (loss, other) in enumerate(zip(expected, losses, strict=True), 1):
    print(f"{step:<8}{loss:<16.6f}{other:<16.6f}{abs(loss - other):.1e}")
np.testing.assert_allclose(losses, expected, rtol=1e-5)
print("The losses are equal.")
