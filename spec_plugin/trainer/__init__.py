"""What the trainer's process does for us: the rollout phase around its engines, the harvest, the check before the loss.

Called by adapters through ``spec_plugin.adapter``; runs on every actor rank, though only the first one has a link to the engines.
It knows no trainer by name and no vLLM.
"""
