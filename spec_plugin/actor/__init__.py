"""The actor process: what an adapter does around each rollout phase, links to the engines, and the harvest."""
