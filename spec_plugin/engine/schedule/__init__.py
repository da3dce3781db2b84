"""How much the running engine drafts: k by batch size, the guard, the pause, the step log."""
