"""The demonstration: two tiny models from scratch, then PPO on them, and a judgement of both."""
