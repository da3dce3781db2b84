"""Break-even control: what steps cost, which k pays at which batch size, and when to stop (law 7)."""
