"""Settings with which all stages of ``jllama speedrun`` take seconds."""

from pathlib import Path

SETTINGS = """
run_dir: run
depth: 1
corpus: corpus
base:
  model: {embed_dim: 32, num_heads: 2, max_seq_len: 64}
  data: {vocab_size: 340}
  training: {steps: 20, batch_size: 8, seq_len: 64, eval_every: 10, log_every: 5, sample_tokens: 8}
chat:
  training: {steps: 8, batch_size: 4, eval_every: 4, log_every: 2, seq_len: 64, sample_tokens: 8}
rewards:
  data: {validation_fraction: 0.05}
  training: {steps: 4, batch_size: 16, eval_every: 2, log_every: 1, seq_len: 63}
"""
_TEXT = "The clockmaker asked what a llama is, and how much {} and {} are. It is {}.\n"


def write_settings(folder: Path) -> Path:
    """Write a corpus and settings of a road, relative to the folder, and return the settings."""
    (folder / "corpus").mkdir()
    for number in range(40):
        lines = [_TEXT.format(number, other, number + other) for other in range(20)]
        (folder / "corpus" / f"{number}.txt").write_text("".join(lines))
    (folder / "road.yaml").write_text(SETTINGS)
    return folder / "road.yaml"
