"""Proximal policy optimisation, and policy gradients with group baselines."""

from fastrl.ppo.trainer import PPOTrainer

__all__ = ["PPOTrainer"]
