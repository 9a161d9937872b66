"""A broker inside the process: the same promises as the real ones, for tests and for trying things out."""
