"""What training scripts use beside trainers, under TRL's names: arguments, data, rewards."""
