"""One part, in this process: ``python -m examples.bench.card_parts FILE``, a record that ``card.py`` began."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from examples.bench import common
from examples.bench.card_parts import setup
from examples.bench.card_parts.record import resume


def main(file: Path) -> int:
    """Run the part that the record names; what it raises goes into the record, and the exit status is 1."""
    record = resume(file)
    part = record.content["part"]
    common.prepare_process(record.settings["threads"])
    record.limit(record.settings["soft_seconds"])
    try:
        device = "cuda" if record.settings["cuda"] else "cpu"
        models = None if part in setup.WITHOUT_MODELS else setup.models(record, device)
        if part != "models":
            importlib.import_module(f"examples.bench.card_parts.{part}").measure(record, models)
    except Exception as error:  # the rows so far are kept, and the other parts go on
        traceback.print_exc()
        last = "".join(traceback.format_exception(error))[-3000:]
        record.finish("failed", last)
        return 1
    record.finish("done")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
