"""Drafting methods, one small plugin each."""
