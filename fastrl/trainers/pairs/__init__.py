"""DPO and KTO: learning from preferences with TRL's names."""
