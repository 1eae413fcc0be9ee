"""Rewards: answers are verified on the host."""
