"""What a decoding step of the engine takes, and what it makes: running medians of seconds, and chances of acceptance.

Called by the controller, by the ledger, by links that merge several engines, and by whoever plans ahead; no process of its own.
"""
