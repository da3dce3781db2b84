"""What a decoding step of the engine takes, and what it makes: for the controller, the ledger and whoever plans ahead."""
