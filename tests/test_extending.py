"""What people add from outside the package, each in at most 30 lines, and used end to end."""

import json

import optax

import jllama


def add_an_optimizer():
    """LAMB (You et al. 2020, arXiv:1904.00962): Adam's direction, as long as the parameter that it moves."""

    def lamb(config):
        direction = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
        return optax.chain(direction, optax.scale_by_trust_ratio())

    jllama.OPTIMIZERS["lamb"] = lamb


def test_an_optimizer(tmp_path, monkeypatch):
    """It is trained with under the schedule, the clip and the weight decay of all, and its runs are resumed."""
    monkeypatch.setitem(jllama.OPTIMIZERS, "lamb", None)  # gone afterwards
    add_an_optimizer()
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)

    def train(steps, **changes):
        config = jllama.TrainConfig(
            jllama.LlamaConfig(num_layers=2, embed_dim=32, num_heads=2, max_seq_len=32),
            run_dir=str(tmp_path / "run"),
            data=jllama.DataConfig(str(tmp_path / "text.txt"), tokenizer="bytes", cache_dir=str(tmp_path / "cache")),
            optimizer=jllama.OptimizerConfig("lamb", learning_rate=0.02),
            training=jllama.LoopConfig(batch_size=8, steps=steps, log_every=1, sample_tokens=0),
            **changes,
        )
        return jllama.train(config)

    train(20)
    train(40, resume="auto", resume_with_changes=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 40
    assert losses[-1] < losses[19] < losses[0] - 1
