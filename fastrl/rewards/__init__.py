"""Rewards: functions by name, sequence classifiers, judges."""
