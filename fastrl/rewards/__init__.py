"""Reward functions: a user's own by name, sequence classifiers, judges."""
