"""`python -m e2e.install`: guidevane and Prometheus into the cluster that kubectl points at, waited for."""

import argparse
import time

from e2e.support import install_guidevane


def main() -> None:
    argparse.ArgumentParser(prog="python -m e2e.install", description=__doc__).parse_args()
    start = time.monotonic()
    install_guidevane(lambda what: print(f"{time.monotonic() - start:6.1f} s  {what}", flush=True))
    print(f"{time.monotonic() - start:6.1f} s  operator and Prometheus are up", flush=True)


if __name__ == "__main__":
    main()
