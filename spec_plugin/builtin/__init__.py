"""The built-in plugins: drafting methods, draft trainer, provenance guard, break-even controller, metrics."""
