"""One package per group: `app.py` declares it, `messages.py` what it reads, `schema.sql` its tables."""
