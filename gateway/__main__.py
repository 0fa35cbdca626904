"""python -m gateway --model FOLDER: one gateway process."""

import gc
import sys

import uvloop

from gateway import served_model
from gateway.app import serve
from shared import model_folder, model_store
from shared.config import FATAL_EXIT, parse_args
from shared.observe import setup_logging

GC_THRESHOLDS = (50_000, 20, 50)  # what ends is freed by its references; a collection only stops the streams


def main() -> int:
    config = parse_args("Quire's gateway: HTTP for one scheduler")
    setup_logging(config)
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        folder = model_store.resolve(config.model, config.cache_dir, weights=False)
        name = config.served_model_name or model_store.default_name(config.model)
        model = served_model.load(folder, name, model_folder.fingerprint(folder))
        uvloop.run(serve(config, model))
    except (ValueError, OSError, model_folder.ModelError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return FATAL_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
