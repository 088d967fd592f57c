"""Runs and their records: from a task, a method and a seed to one folder on disk."""
