"""What the flag would do on machines that are not here: a roofline of the engine's steps, and rollouts simulated on it."""
