"""Responses to prompts, with their rewards: what every online method learns from."""
