"""``python -m loadstone``."""

from loadstone.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
