"""What several test modules build their cases from: targets, batches, links, runs. No test module imports from another one."""
