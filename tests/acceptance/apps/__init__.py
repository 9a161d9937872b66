"""Consumer groups that do as their messages say."""
