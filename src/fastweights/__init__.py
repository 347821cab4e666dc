"""Hebbian fast weights: learning from one example."""
