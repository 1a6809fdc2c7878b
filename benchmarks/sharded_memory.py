"""Peak memory of processes that initialize, save and restore a training state that they share.

Each process stands for a host of one device; its largest resident set is measured (on Linux). The
bound is its share of the float32 parameters and moments plus 2 GB. Saving copies the share once
more, so the bound does not apply to it.

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
    """Run each job in new processes; the exit code is 1 if one of them is over the bound."""
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
            command = [sys.executable, __file__]
            command += ["--layers", str(options.layers), "--processes", str(options.processes)]
            started = []
            for index in range(options.processes):
                words = ["--as_process", json.dumps([job, folder, port, index])]
                started.append(
                    subprocess.Popen([*command, *words], env=environment(), stdout=subprocess.PIPE)
                )
            for process in started:
                result = json.loads(process.communicate()[0].splitlines()[-1])
                print(json.dumps(result), flush=True)
                if job != "save":
                    worst = max(worst, result["over_share_gb"])
    print(f"at most {worst:.2f} GB over a process's share; the bound is 2")
    return int(worst > 2)


def environment() -> dict[str, str]:
    """Return an environment with one CPU device a process."""
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def measure(layers: int, processes: int, job: str, folder: str, port: int, index: int) -> int:
    """Do one process's part of a job, and print what it took as JSON."""
    import jax

    jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    from jllama.core.config import LlamaConfig
    from jllama.formats.run_checkpoints import RunCheckpoints
    from jllama.parallel.config import MeshConfig
    from jllama.training.compiling import compile_training
    from jllama.training.config import LoopConfig, TrainConfig

    model = LlamaConfig(32_000, layers, embed_dim=1024, num_heads=16, mlp_dim=2736, max_seq_len=256)
    config = TrainConfig(
        model, mesh=MeshConfig(1, fsdp=processes), training=LoopConfig(batch_size=processes)
    )
    training = compile_training(config)
    abstract = jax.eval_shape(training.init, jax.random.key(0))
    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(abstract)]
    share_gb = sum(4 * math.prod(shape) for shape in shards) / 1e9
    checkpoints = RunCheckpoints(Path(folder, "checkpoints"))
    start_s = time.perf_counter()
    if job == "restore":
        others = {"opt_state": abstract.opt_state, "step": abstract.step}
        params, saved, _ = checkpoints.restore(0, abstract.params, others)
        jax.block_until_ready((params, saved))
    else:
        state = jax.block_until_ready(training.init(jax.random.key(0)))
        if job == "save":
            others = {"opt_state": state.opt_state, "step": state.step}
            checkpoints.save(0, state.params, others, {}, None)
            checkpoints.wait()
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    result = {
        "job": job,
        "process": index,
        "share_gb": round(share_gb, 2),
        "peak_gb": round(peak_gb, 2),
        "over_share_gb": round(peak_gb - share_gb, 2),
        "seconds": round(time.perf_counter() - start_s, 1),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
