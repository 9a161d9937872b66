"""Order events: a projection, and the invoices that follow from it."""
