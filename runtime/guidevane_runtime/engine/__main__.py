"""`python -m guidevane_runtime.engine`: started by the server, never by hand."""

import argparse
import sys

from guidevane_runtime.engine.process import main
from guidevane_runtime.logs import configure_logging

DEFAULT_LOADER = "guidevane_runtime.engine.runner:load_runner"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m guidevane_runtime.engine", description=__doc__)
    parser.add_argument("--mailbox-fd", type=int, required=True, help="inherited socket to the server")
    parser.add_argument("--loader", default=DEFAULT_LOADER, help="module:function that loads the model")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    configure_logging(args.log_format)
    sys.exit(main(args.mailbox_fd, args.loader))
