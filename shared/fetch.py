"""python -m shared.fetch LINK [settings]: put --model into the cache and point LINK (a symlink) at its folder.

The one step that needs the network or torch: afterwards every role starts from LINK, with the folder mounted read-only.
"""

import argparse
import os
import sys
from pathlib import Path

from shared import config as settings
from shared import model_folder, model_store
from shared.config import FATAL_EXIT, BadConfig
from shared.model_folder import ModelError
from shared.observe import setup_logging


def point(link: Path, folder: Path) -> None:
    """Replace link in one step. It is relative, so it holds wherever the cache is mounted."""
    draft = link.with_name(f".{link.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(os.path.relpath(folder.resolve(), link.parent.resolve()))
    draft.replace(link)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fetch", description="Put a model into the cache.")
    parser.add_argument("link", type=Path, metavar="LINK", help="symlink to make, in the cache or beside it")
    settings.add_flags(parser)
    parsed = parser.parse_args(argv)
    try:
        config = settings.load(parsed)
        setup_logging(config)
        folder = model_store.resolve(config.model, config.cache_dir)
        model_folder.check(folder)
        point(parsed.link, folder)
    except (BadConfig, ModelError, OSError) as error:
        print(f"fetch: error: {error}", file=sys.stderr)
        return FATAL_EXIT
    print(f"{parsed.link} -> {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
