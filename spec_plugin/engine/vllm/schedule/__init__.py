"""How much the running engine drafts: k by batch size, the cut-off, the pause, the step log."""
