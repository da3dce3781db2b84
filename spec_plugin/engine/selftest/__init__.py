"""The start-up self-test of a running engine, and the calibration of its steps."""
