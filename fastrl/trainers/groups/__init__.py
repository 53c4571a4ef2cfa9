"""Trainers by TRL 1.x's names, arguments and settings."""
