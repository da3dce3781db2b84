"""What a person runs: the command line, doctor, check, train."""
