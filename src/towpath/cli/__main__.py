"""`python -m towpath.cli`, where the console script is not on the path."""

from towpath.cli import main

main()
