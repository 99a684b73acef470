"""Batched policy inference."""
