"""Benchmarks: speed-up, cost of harvest, refresh in a running engine, cost of the flag when speculation is off."""
