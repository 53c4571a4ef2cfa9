"""TRL's trainers of earlier versions."""
