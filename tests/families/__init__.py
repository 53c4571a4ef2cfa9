"""Every family of causal language models of transformers, tiny, through every kind of batch."""
