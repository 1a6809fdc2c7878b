"""Peak memory of each of several processes that initialise, save and restore a training state split between them.

Each process stands for a host of one device and is measured by its largest resident set (Linux). The bound is its share
of the float32 parameters and moments plus 2 GB. Saving copies the share once more, so it is told apart.

    python benchmarks/sharded_memory.py --processes 2 --layers 16
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOBS = ("init", "save", "restore")


def main() -> int:
    """Run each job in fresh processes and print a table; the exit code is 1 if one of them is over the bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16, help="each has 12.6 million parameters")
    parser.add_argument("--as_process", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_process:
        return measure(options.layers, options.processes, *options.as_process)
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for job in JOBS:
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            words = [
                sys.executable,
                __file__,
                "--layers",
                str(options.layers),
                "--processes",
                str(options.processes),
            ]
            started = [
                subprocess.Popen(
                    [*words, "--as_process", json.dumps([job, folder, port, index])],
                    env=environment(),
                    stdout=-1,
                )
                for index in range(options.processes)
            ]
            for process in started:
                found = json.loads(process.communicate()[0].splitlines()[-1])
                print(json.dumps(found), flush=True)
                worst = max(worst, found["over_share_gb"] if job != "save" else 0)
    print(f"at most {worst:.2f} GB over a process's share; the bound is 2")
    return int(worst > 2)


def environment() -> dict[str, str]:
    """One CPU device a process."""
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def measure(layers: int, processes: int, job: str, folder: str, port: int, index: int) -> int:
    """One process's part of a job, and what it took, as JSON on stdout."""
    import jax

    jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    from jllama.checkpoints.run_checkpoints import RunCheckpoints
    from jllama.config import LlamaConfig, MeshConfig
    from jllama.training.config import LoopConfig, TrainConfig
    from jllama.training.step import compile_training

    model = LlamaConfig(32_000, layers, embed_dim=1024, num_heads=16, mlp_dim=2736, max_seq_len=256)
    config = TrainConfig(
        model, mesh=MeshConfig(1, fsdp=processes), training=LoopConfig(batch_size=processes)
    )
    training = compile_training(config)
    abstract = jax.eval_shape(training.init, jax.random.key(0))
    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(abstract)]
    share_gb = sum(4 * math.prod(shape) for shape in shards) / 1e9
    checkpoints, start_s = RunCheckpoints(Path(folder, "checkpoints")), time.perf_counter()
    if job == "restore":
        others = {"opt_state": abstract.opt_state, "step": abstract.step}
        params, saved, _ = checkpoints.restore(0, abstract.params, others)
        jax.block_until_ready((params, saved))
    else:
        state = jax.block_until_ready(training.init(jax.random.key(0)))
        if job == "save":
            checkpoints.save(
                0, state.params, {"opt_state": state.opt_state, "step": state.step}, {}, None
            )
            checkpoints.wait()
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    found = {"share_gb": share_gb, "peak_gb": peak_gb, "over_share_gb": peak_gb - share_gb}
    rounded = {name: round(value, 2) for name, value in found.items()}
    print(
        json.dumps(
            {
                "job": job,
                "process": index,
                **rounded,
                "seconds": round(time.perf_counter() - start_s, 1),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
