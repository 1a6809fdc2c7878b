"""Rewards: functions that say how good answers to a prompt are, and what runs them.

A reward takes ``(prompt, answers, row)`` and returns a number for each answer. ``prompt`` is a text
or a list of messages, and ``row`` all fields of its record.
"""

from jllama.rl.scorer import RewardError as RewardError, Scorer as Scorer, Scores as Scores
from jllama.rl.shipped import REWARDS as REWARDS, Reward as Reward
