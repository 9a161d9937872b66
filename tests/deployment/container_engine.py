"""`docker run --env-file FILE IMAGE WORD…` in the layout of the image, where there is no container engine."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fixtures.images import IMAGES, Container, read


def main() -> int:
    """The exit code of the command in the image."""
    parser = argparse.ArgumentParser(prog="docker")
    parser.add_argument("--prefix", type=Path, required=True, help="what the build stage installed")
    parser.add_argument("verb", choices=["run"])
    parser.add_argument("--env-file", type=Path, required=True)
    parser.add_argument("image", choices=[read(name).tag for name in IMAGES])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    (image,) = [read(name) for name in IMAGES if read(name).tag == options.image]
    environment = dict(line.split("=", 1) for line in options.env_file.read_text().splitlines())
    with tempfile.TemporaryDirectory() as directory:
        container = Container(image, options.prefix, Path(directory), environment)
        done = container.run(*(options.command or image.command))
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
