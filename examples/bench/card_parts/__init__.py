"""What ``card.py`` measures on one GPU, a module for each part; each part runs in a process of its own."""
