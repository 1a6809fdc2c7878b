"""Learn from rewards in a loop of your own: a reward, an objective, and what they are given to.

    python examples/own_rewards.py runs/sums my_sums/prompts.jsonl my_model/

docs/rewards.md says how to make the first two, and what ``jllama train grpo`` does besides.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp

import jllama
from jllama.data.prompts import prepare_prompts
from jllama.rl.rollouts import Sampler, assemble, group_advantages, sampled_log_probs, score_samples
from jllama.training.objectives import drawn_scores

NUM_PROMPTS, GROUP_SIZE, NUM_STEPS = 8, 8, 60
base, prompts, output = sys.argv[1:]


def right(prompt, answers, row):
    """Reward an answer that is the row's."""
    return [answer == row["answer"] for answer in answers]


def reinforce(forward, batch, options):
    """Make the tokens of good answers likelier, and of bad ones less likely."""
    log_probs, entropy = drawn_scores(forward, batch, options.grpo.max_answer_tokens)
    losses = -batch.sampled.advantages[:, None] * log_probs
    loss, entropy = (jnp.sum(jnp.where(batch.counted, x, 0.0)) for x in (losses, entropy))
    return loss, jnp.sum(batch.counted, dtype=jnp.float32), {"entropy": entropy}


jllama.OBJECTIVES["reinforce"] = reinforce
model = jllama.load(base, layout="training")
config = jllama.TrainConfig(
    model.config,
    optimizer=jllama.OptimizerConfig(learning_rate=3e-4, warmup_steps=5, weight_decay=0.0),
    sampling=jllama.SamplingParams(temperature=1.0, top_p=1.0),
    training=jllama.LoopConfig(
        objective="reinforce",
        batch_size=NUM_PROMPTS * GROUP_SIZE,
        seq_len=31,
        steps=NUM_STEPS,
        grpo=jllama.GrpoConfig(group_size=GROUP_SIZE, max_answer_tokens=16),
    ),
)
training = jllama.compile_training(config)
state = training.init(jax.random.key(0), model.params)
data = prepare_prompts(jllama.DataConfig(path=prompts), model.text_tokenizer, None, 16)
scorer = jllama.Scorer({"right": 1.0}, functions={"right": right})
sampler = Sampler(model, training)  # an engine with the weights of the step

for step, rows in zip(range(NUM_STEPS), data.training_prompts(NUM_PROMPTS, seed=0), strict=False):
    sampler.load(state.params, state.base)
    seeds = range(step * config.training.batch_size, (step + 1) * config.training.batch_size)
    samples = sampler.answer([row for row in rows for _ in range(GROUP_SIZE)], seeds)
    rewards = score_samples(scorer, rows, samples).total
    advantages = group_advantages(rewards, "centered").ravel()
    batch = assemble(samples, advantages, training.plan, model.config.vocab_size)
    old = sampled_log_probs(training, batch, state.base, state.params)
    assert batch.sampled is not None
    mismatch = abs(old - batch.sampled.sampler).max()
    state, metrics = training.step(state, batch)
    if step % 10 == 9:
        print(f"step {step + 1}: reward {rewards.mean():.3f}, mismatch {mismatch:.1e}")

jllama.save(dataclasses.replace(model, params=state.params), output)
