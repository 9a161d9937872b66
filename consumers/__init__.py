"""Consumer groups as deployables: `python -m consumers run <group>`."""
