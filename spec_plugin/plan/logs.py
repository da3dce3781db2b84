"""Lets the plugin's few lines through in worker processes, whose trainers leave them without a handler for INFO."""

from __future__ import annotations

import logging


def configure_logging() -> None:
    """Give our logger a handler of its own, once per process; the trainer's own logging stays as it is."""
    logger = logging.getLogger("spec_plugin")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
