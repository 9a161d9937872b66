"""The alembic environment: revisions that only emit SQL, and the fingerprint of the newest schema."""
