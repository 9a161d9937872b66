"""One module for each kind of cell; each function runs one subject in one round."""
