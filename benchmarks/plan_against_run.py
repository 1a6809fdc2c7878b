"""Planned memory compared with that of a run, on eight simulated devices of this machine's CPU.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/plan_against_run.py

Arguments are the bytes of the arrays on the first device. Temporaries are the rise of the process's
peak during a step, divided by the number of devices; they include the collectives and threads of a
CPU.
"""

import gc
import json
from pathlib import Path

import jax
import numpy as np

import jllama
from jllama.core.config import LlamaConfig
from jllama.parallel.config import MeshConfig
from jllama.parallel.sharding import make_mesh
from jllama.system.memory import program_bytes
from jllama.training.compiling import compile_training
from jllama.training.config import LoopConfig, TrainConfig

MODEL = LlamaConfig(8192, 4, 512, 8, 4, 64, 1536, max_seq_len=512)


def resident_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def main() -> None:
    for sizes in ({"data": 1, "fsdp": 8}, {"data": 8}, {"data": 1, "fsdp": 4, "tensor": 2}):
        loop = LoopConfig(batch_size=32, seq_len=512, remat="dots", attention="reference")
        config = TrainConfig(MODEL, mesh=MeshConfig(**sizes), training=loop)
        mesh = make_mesh(config.mesh)
        training = compile_training(config, mesh)
        state = training.init(jax.random.key(0))
        batch = jax.device_put(
            jllama.text_batch(np.ones((32, 513), np.int32), bos_id=0), training.batch_sharding
        )
        step = training.step.lower(state, batch).compile()
        arguments, temporaries = program_bytes(step)
        state, _ = jax.block_until_ready(step(state, batch))
        gc.collect()
        leaves = [
            *jax.tree.leaves(state._replace(key=jax.random.key_data(state.key))),
            *jax.tree.leaves(batch),
        ]
        held_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = resident_bytes("VmRSS")
        state, _ = jax.block_until_ready(step(state, batch))
        rise = (resident_bytes("VmHWM") - before) / len(mesh.devices.flat)
        row = {"mesh": sizes, "planned_MiB": [arguments / 2**20, temporaries / 2**20]}
        row |= {"held_MiB": [held_bytes / 2**20, rise / 2**20]}
        total_error = (arguments + temporaries) / (held_bytes + rise) - 1
        row |= {"error": [arguments / held_bytes - 1, total_error]}
        print(json.dumps(row, default=float))


if __name__ == "__main__":
    main()
