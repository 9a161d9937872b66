"""What it costs: each figure beside that of a floor program, measured in turn in the same run."""
