"""The demonstration: SFT, a reward model and PPO on generated texts, and a criterion of success."""
