"""Proximal policy optimisation, and policy gradients with group baselines."""

from fastrl.trainers.ppo.trainer import PPOTrainer

__all__ = ["PPOTrainer"]
