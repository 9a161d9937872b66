"""Programs to read and to run; not part of the installed package."""
