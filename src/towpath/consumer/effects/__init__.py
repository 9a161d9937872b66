"""How each kind of effect is run so that it does not happen twice."""
