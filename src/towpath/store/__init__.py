"""Postgres: migrations, named SQL statements, and one module per table family."""
