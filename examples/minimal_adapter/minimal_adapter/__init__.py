"""A small RL loop (``loop``) and the adapter that gives it speculative rollouts (``adapter``)."""
